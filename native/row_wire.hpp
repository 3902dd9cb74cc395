// A row in a message between ranks: float32 as it is, bfloat16 rounded to the nearest, or float16 with an exponent in front.
//
// Gradients are often smaller than anything float16 can say, so a float16 row is divided by a power of two, as in wire.hpp;
// the exponent takes two bytes, so that values stay aligned. Rows of one message lie one behind the other.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "rows.hpp"
#include "wire.hpp"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace hotrow {

inline size_t wire_bytes(size_t dim, Wire wire) {
    return wire == Wire::float32 ? 4 * dim : wire == Wire::bfloat16 ? 2 * dim : 2 * (dim + 1);
}

// in[n] times `scale` in half precision.
inline void narrow(const float* in, float scale, std::byte* out, size_t n) {
    size_t j = 0;
#if defined(__F16C__)
    const __m256 by = _mm256_set1_ps(scale);
    for (; j + 8 <= n; j += 8) {
        const __m128i halves = _mm256_cvtps_ph(_mm256_mul_ps(_mm256_loadu_ps(in + j), by), _MM_FROUND_TO_NEAREST_INT);
        std::memcpy(out + 2 * j, &halves, 16);
    }
#endif
    for (; j < n; ++j) {
        const uint16_t half = to_half(in[j] * scale);
        std::memcpy(out + 2 * j, &half, 2);
    }
}

inline void widen_halves(const std::byte* in, float scale, float* out, size_t n) {
    size_t j = 0;
#if defined(__F16C__)
    const __m256 by = _mm256_set1_ps(scale);
    for (; j + 8 <= n; j += 8) {
        __m128i halves;
        std::memcpy(&halves, in + 2 * j, 16);
        _mm256_storeu_ps(out + j, _mm256_mul_ps(_mm256_cvtph_ps(halves), by));
    }
#endif
    for (; j < n; ++j) {
        uint16_t half;
        std::memcpy(&half, in + 2 * j, 2);
        out[j] = from_half(half) * scale;
    }
}

inline void write_row(const float* in, size_t dim, Wire wire, std::byte* out) {
    if (wire == Wire::float32) {
        std::memcpy(out, in, 4 * dim);
    } else if (wire == Wire::bfloat16) {
        for (size_t j = 0; j < dim; ++j) {
            const uint16_t rounded = nearest_bf16(in[j]);
            std::memcpy(out + 2 * j, &rounded, 2);
        }
    } else {
        const int16_t exponent = row_exponent(in, dim);
        std::memcpy(out, &exponent, 2);
        narrow(in, power_of_two(-exponent), out + 2, dim);
    }
}

inline void write_zeros(size_t dim, Wire wire, std::byte* out) { std::memset(out, 0, wire_bytes(dim, wire)); }

inline void read_row(const std::byte* in, size_t dim, Wire wire, float* out) {
    if (wire == Wire::float32) {
        std::memcpy(out, in, 4 * dim);
    } else if (wire == Wire::bfloat16) {
        for (size_t j = 0; j < dim; ++j) {
            uint16_t rounded;
            std::memcpy(&rounded, in + 2 * j, 2);
            out[j] = from_bf16(rounded);
        }
    } else {
        int16_t exponent;
        std::memcpy(&exponent, in, 2);
        widen_halves(in + 2, power_of_two(std::clamp<int>(exponent, -126, 126)), out, dim);
    }
}

}  // namespace hotrow
