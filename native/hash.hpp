// Hashing, and the value a new row starts from. Both depend on their arguments alone: the same key gives the
// same row on every machine, in any order of arrival and on any number of shards.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace hotrow {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

// The finalizer of splitmix64: a bijection on 64 bits in which every input bit moves every output bit.
constexpr uint64_t mix(uint64_t x) {
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9ull;
    x ^= x >> 27;
    x *= 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

inline uint64_t hash_key(int64_t key) { return mix(static_cast<uint64_t>(key) + kGolden); }

// Maps 64 random bits to [0, n) by their high end, without a division.
inline uint64_t scale_to(uint64_t bits, uint64_t n) {
    __extension__ using wide = unsigned __int128;
    return static_cast<uint64_t>((static_cast<wide>(bits) * n) >> 64);
}

enum class InitKind : int { uniform = 0, normal = 1, fill = 2 };

struct Init {
    InitKind kind = InitKind::uniform;
    float scale = 0.05f;  // half width, standard deviation, or the value itself
    uint64_t salt = 0;    // made from seed and table name

    void row(int64_t key, float* out, size_t dim) const {
        if (kind == InitKind::fill) {
            for (size_t j = 0; j < dim; ++j) out[j] = scale;
            return;
        }
        const uint64_t base = mix(static_cast<uint64_t>(key) ^ salt);
        constexpr float unit = 0x1p-24f;
        for (size_t j = 0; j < dim; j += 2) {
            const uint64_t r = mix(base + (j / 2 + 1) * kGolden);
            const float u0 = static_cast<float>(r >> 40) * unit;
            const float u1 = static_cast<float>((r >> 16) & 0xFFFFFF) * unit;
            float a, b;
            if (kind == InitKind::uniform) {
                a = (2.0f * u0 - 1.0f) * scale;
                b = (2.0f * u1 - 1.0f) * scale;
            } else {  // Box and Muller; in double, so that the last bit hardly depends on the math library
                const double radius = std::sqrt(-2.0 * std::log(static_cast<double>(u0) + 0x1p-25));
                const double angle = 6.283185307179586 * static_cast<double>(u1);
                a = static_cast<float>(radius * std::cos(angle)) * scale;
                b = static_cast<float>(radius * std::sin(angle)) * scale;
            }
            out[j] = a;
            if (j + 1 < dim) out[j + 1] = b;
        }
    }
};

}  // namespace hotrow
