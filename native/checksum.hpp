// Sums that show whether bytes in a file are those that were written. They are against accidents, not against malice.
//
// Each word of 32 bits counts with an odd weight of its own, modulo 2^64. Of that 32 bits are kept, so once in 2^32 cases a
// change does not show. It costs two multiplications for 32 bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hash.hpp"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace hotrow {

constexpr size_t kWeights = 256;

// Room for one more than are used: the odd half of a vector of words begins one on.
constexpr std::array<uint32_t, kWeights + 8> make_weights() {
    std::array<uint32_t, kWeights + 8> out{};
    for (size_t i = 0; i < out.size(); ++i) out[i] = static_cast<uint32_t>(mix(i + 1)) | 1;
    return out;
}
alignas(64) inline constexpr std::array<uint32_t, kWeights + 8> kWeight = make_weights();

// The sum of at most kWeights words.
inline uint64_t weigh_block(const std::byte* from, size_t words) {
    uint64_t total = 0;
    size_t i = 0;
#if defined(__AVX2__)
    __m256i even = _mm256_setzero_si256(), odd = even;
    const auto add = [&](__m256i x) {
        const auto* weights = kWeight.data() + i;
        even = _mm256_add_epi64(even, _mm256_mul_epu32(x, _mm256_load_si256(reinterpret_cast<const __m256i*>(weights))));
        odd = _mm256_add_epi64(odd, _mm256_mul_epu32(_mm256_srli_epi64(x, 32),
                                                     _mm256_loadu_si256(reinterpret_cast<const __m256i*>(weights + 1))));
    };
    for (; i + 8 <= words; i += 8) add(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 4 * i)));
    if (i < words) {
        alignas(32) static constexpr int32_t kMasks[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
        const auto* mask = kMasks + 8 - (words - i);
        add(_mm256_maskload_epi32(reinterpret_cast<const int*>(from + 4 * i),
                                  _mm256_loadu_si256(reinterpret_cast<const __m256i*>(mask))));
    }
    even = _mm256_add_epi64(even, odd);
    const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(even), _mm256_extracti128_si256(even, 1));
    total = static_cast<uint64_t>(_mm_cvtsi128_si64(two)) + static_cast<uint64_t>(_mm_extract_epi64(two, 1));
#else
    for (; i < words; ++i) {
        uint32_t word;
        std::memcpy(&word, from + 4 * i, 4);
        total += uint64_t{word} * kWeight[i];
    }
#endif
    return total;
}

// The sum of bytes, a multiple of four.
inline uint64_t weigh(const std::byte* from, size_t bytes) {
    size_t words = bytes / 4;
    uint64_t total = 0;
    for (; words > kWeights; words -= kWeights, from += 4 * kWeights) total = (total + weigh_block(from, kWeights)) * kGolden;
    return total + weigh_block(from, words);
}

// 32 bits of a sum.
inline uint32_t fold(uint64_t sum) { return static_cast<uint32_t>((sum * kGolden) >> 32); }

}  // namespace hotrow
