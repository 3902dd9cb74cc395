// The values of rows: copying them, and bfloat16, which is float32 with the lower 16 bits rounded away. Stochastic
// rounding keeps small updates alive: a value goes up with the probability of its remainder, so that what is lost
// cancels out over many steps. The random bits come from key, clock and column, so that a run is repeatable and a
// resumed one is the same.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "hash.hpp"

#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace hotrow {

// Calls body(dim), the usual dims as constants: the compiler then unrolls every loop over a row.
template <class Body>
void with_dim(size_t dim, Body body) {
    switch (dim) {
        case 16: return body(std::integral_constant<size_t, 16>{});
#ifndef HOTROW_SANITIZED  // one constant shows what sanitizers can find, in half the time to build
        case 8: return body(std::integral_constant<size_t, 8>{});
        case 32: return body(std::integral_constant<size_t, 32>{});
        case 64: return body(std::integral_constant<size_t, 64>{});
        case 128: return body(std::integral_constant<size_t, 128>{});
#endif
        default: return body(dim);
    }
}

inline float from_bf16(uint16_t x) { return std::bit_cast<float>(static_cast<uint32_t>(x) << 16); }

// A row is a few cache lines: copying it in place beats a call of memcpy.
inline void copy_floats(float* __restrict out, const float* __restrict in, size_t n) {
    size_t j = 0;
    for (; j + 16 <= n; j += 16) std::memcpy(out + j, in + j, 64);
    for (; j < n; ++j) out[j] = in[j];
}

// As copy_floats, of whole lines that are not asked for before they are written; `written_past` ends a run of such copies.
// For results larger than a core's cache: a model that reads them right afterwards was not slower for it.
#if defined(__AVX__)
constexpr bool kWritesPast = true;
inline void copy_past(float* __restrict out, const float* __restrict in, size_t n) {
    for (size_t j = 0; j < n; j += 8) _mm256_stream_ps(out + j, _mm256_loadu_ps(in + j));
}
inline void written_past() { _mm_sfence(); }
#else
constexpr bool kWritesPast = false;
inline void copy_past(float* __restrict out, const float* __restrict in, size_t n) { copy_floats(out, in, n); }
inline void written_past() {}
#endif

inline void widen(const uint16_t* in, float* out, size_t n) {
    for (size_t j = 0; j < n; ++j) out[j] = from_bf16(in[j]);
}

inline uint16_t nearest_bf16(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>((bits >> 16) | 0x40);  // NaN stays NaN
    return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline void round_nearest(const float* in, uint16_t* out, size_t n) {
    for (size_t j = 0; j < n; ++j) out[j] = nearest_bf16(in[j]);
}

inline void round_stochastic(const float* in, uint16_t* out, size_t n, int64_t key, uint32_t clock) {
    const uint64_t base = mix(static_cast<uint64_t>(key) + kGolden * (static_cast<uint64_t>(clock) + 1));
    for (size_t j = 0; j < n; ++j) {
        const uint32_t bits = std::bit_cast<uint32_t>(in[j]);
        const uint32_t random = static_cast<uint32_t>(mix(base + j) >> 48);
        const bool finite = (bits & 0x7F800000) != 0x7F800000;
        out[j] = finite ? static_cast<uint16_t>((bits + random) >> 16) : nearest_bf16(in[j]);
    }
}

}  // namespace hotrow
