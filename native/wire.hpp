// What travels between a client and its shards: which shard a key belongs to, keys in as few bytes as they need, and values as
// float32, bfloat16, or float16 with an exponent for each row.
//
// Keys of a table are sent as their distance from the smallest one, in the bytes that the largest distance needs. float16
// values are divided by a power of two, so that the largest of their row lies in [1, 2): the scaling itself rounds nothing, and
// no row is too large or too small for the format.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "grouping.hpp"
#include "hash.hpp"
#include "rows.hpp"
#include "threads.hpp"

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace hotrow {

enum class Wire : int { float32 = 0, bfloat16 = 1, float16 = 2 };

// Mixed once more: the store finds rows by the bits of hash_key, which should still differ among the keys of one shard.
inline size_t shard_of(int64_t key, size_t shards) { return mix(hash_key(key)) % shards; }

// Nearest, ties to even; the usual bit tricks.
inline uint16_t to_half(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t sign = (bits >> 16) & 0x8000;
    uint32_t f = bits & 0x7FFFFFFF;
    if (f >= 0x47800000) return static_cast<uint16_t>(sign | (f > 0x7F800000 ? 0x7E00 : 0x7C00));
    if (f < 0x38800000) {  // below half's normal numbers: adding 0.5 leaves the wanted bits at the end
        const float shifted = std::bit_cast<float>(f) + 0.5f;
        return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000));
    }
    f += 0xC8000FFF + ((f >> 13) & 1);  // the exponent's bias, and half a last place
    return static_cast<uint16_t>(sign | (f >> 13));
}

inline float from_half(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
    const uint32_t rest = static_cast<uint32_t>(h & 0x7FFF) << 13;
    const uint32_t exponent = rest & 0x0F800000;
    uint32_t f = rest + 0x38000000;
    if (exponent == 0x0F800000) {
        f += 0x38000000;
    } else if (exponent == 0) {
        f = std::bit_cast<uint32_t>(std::bit_cast<float>(f + 0x00800000) - std::bit_cast<float>(0x38800000u));
    }
    return std::bit_cast<float>(sign | f);
}

// The two above for whole rows, by the processor's own instructions where it has them: they round alike.
inline void to_halves(const float* in, float scale, uint16_t* out, size_t n) {
    size_t j = 0;
#if defined(__F16C__)
    const __m256 times = _mm256_set1_ps(scale);
    for (; j + 8 <= n; j += 8) {
        const __m256 x = _mm256_mul_ps(_mm256_loadu_ps(in + j), times);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + j), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    for (; j < n; ++j) out[j] = to_half(in[j] * scale);
}

inline void from_halves(const uint16_t* in, float scale, float* out, size_t n) {
    size_t j = 0;
#if defined(__F16C__)
    const __m256 times = _mm256_set1_ps(scale);
    for (; j + 8 <= n; j += 8) {
        const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + j));
        _mm256_storeu_ps(out + j, _mm256_mul_ps(_mm256_cvtph_ps(halves), times));
    }
#endif
    for (; j < n; ++j) out[j] = from_half(in[j]) * scale;
}

// The exponent of a row's largest finite value, within what a scale may be.
inline int8_t row_exponent(const float* row, size_t dim) {
    uint32_t most = 0;
    for (size_t j = 0; j < dim; ++j) {
        const uint32_t f = std::bit_cast<uint32_t>(row[j]) & 0x7FFFFFFF;
        most = std::max(most, f < 0x7F800000 ? f : 0);
    }
    return static_cast<int8_t>(std::clamp(static_cast<int>(most >> 23) - 127, -126, 126));
}

inline float power_of_two(int exponent) { return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23); }

// The rows of one table in a message, and where they lie in an array of floats: at at[i], or one behind the other.
struct WireRows {
    size_t n, dim;
    const int64_t* at;    // or null
    size_t first_row;     // of the message
    size_t first_value;   // of the message; and of the array, where there is no `at`

    size_t place(size_t i) const { return at == nullptr ? first_value + i * dim : static_cast<size_t>(at[i]); }
};

// Values of a message as they are sent. Only one of the formats is there; exponents only with float16.
struct WireValues {
    std::unique_ptr<float[]> floats;
    std::unique_ptr<uint16_t[]> halves;
    std::unique_ptr<int8_t[]> exponents;
};

// Calls body(table, i, dim) for every row, on all cores: rows do not share memory.
template <class Body>
void for_wire_rows(const std::vector<WireRows>& tables, Body body) {
    constexpr size_t kBlock = 2048;
    struct Block {
        const WireRows* table;
        size_t begin, end;
    };
    std::vector<Block> blocks;
    for (const WireRows& t : tables)
        for (size_t i = 0; i < t.n; i += kBlock) blocks.push_back({&t, i, std::min(t.n, i + kBlock)});
    parallel_for(blocks.size(), [&](size_t b) {
        const Block& block = blocks[b];
        with_dim(block.table->dim, [&](auto dim) {
            for (size_t i = block.begin; i < block.end; ++i) body(*block.table, i, dim);
        });
    });
}

inline void encode_half(const float* in, size_t dim, uint16_t* out, int8_t& exponent) {
    exponent = row_exponent(in, dim);
    to_halves(in, power_of_two(-exponent), out, dim);
}

// Rows from an array to a message, each value divided by `divisor`.
inline WireValues encode(const std::vector<WireRows>& tables, const float* from, Wire wire, float divisor) {
    size_t rows = 0, values = 0;
    for (const WireRows& t : tables) {
        rows += t.n;
        values += t.n * t.dim;
    }
    WireValues out;
    if (wire == Wire::float32) out.floats.reset(new float[values]);
    if (wire != Wire::float32) out.halves.reset(new uint16_t[values]);
    if (wire == Wire::float16) out.exponents.reset(new int8_t[rows]);
    for_wire_rows(tables, [&](const WireRows& t, size_t i, auto dim) {
        const float* in = from + t.place(i);
        const size_t to = t.first_value + i * dim;
        thread_local std::vector<float> divided;
        if (divisor != 1.0f) {
            divided.resize(dim);
            for (size_t j = 0; j < dim; ++j) divided[j] = in[j] / divisor;
            in = divided.data();
        }
        if (wire == Wire::float32)
            std::memcpy(out.floats.get() + to, in, dim * sizeof(float));
        else if (wire == Wire::bfloat16)
            round_nearest(in, out.halves.get() + to, dim);
        else
            encode_half(in, dim, out.halves.get() + to, out.exponents[t.first_row + i]);
    });
    return out;
}

// Rows from a message to an array; `halves` or `floats` are the message's values.
inline void decode(const std::vector<WireRows>& tables, const float* floats, const uint16_t* halves,
                   const int8_t* exponents, Wire wire, float* to) {
    for_wire_rows(tables, [&](const WireRows& t, size_t i, auto dim) {
        const size_t from = t.first_value + i * dim;
        float* out = to + t.place(i);
        if (wire == Wire::float32) {
            copy_floats(out, floats + from, dim);
        } else if (wire == Wire::bfloat16) {
            widen(halves + from, out, dim);
        } else {
            const float scale = power_of_two(std::clamp<int>(exponents[t.first_row + i], -126, 126));
            from_halves(halves + from, scale, out, dim);
        }
    });
}

// A batch's keys for one shard, table after table, and where in the batch's array of floats the row of each lies.
struct Shipment {
    std::vector<int64_t> keys, at;
    std::vector<size_t> counts, dims;
    size_t reach = 0;  // floats the array must have

    std::vector<WireRows> tables() const {
        std::vector<WireRows> out;
        size_t row = 0, value = 0;
        for (size_t t = 0; t < counts.size(); ++t) {
            out.push_back({counts[t], dims[t], at.data() + row, row, value});
            row += counts[t];
            value += counts[t] * dims[t];
        }
        return out;
    }

    size_t values() const {
        size_t total = 0;
        for (size_t t = 0; t < counts.size(); ++t) total += counts[t] * dims[t];
        return total;
    }
};

// One table's share of a batch, as tiers have it: the row of keys[i] begins at start + position * dim.
struct TableKeys {
    const int64_t* keys;
    const int64_t* positions;  // or null
    size_t n, start, dim;
};

// Keys to shards, in their order within each.
inline std::vector<Shipment> ship(const std::vector<TableKeys>& tables, size_t shards) {
    std::vector<std::vector<uint16_t>> owners(tables.size());
    std::vector<std::vector<size_t>> counts(tables.size(), std::vector<size_t>(shards, 0));
    parallel_for(tables.size(), [&](size_t t) {  // each its own table
        owners[t].resize(tables[t].n);
        for (size_t i = 0; i < tables[t].n; ++i) {
            owners[t][i] = static_cast<uint16_t>(shards == 1 ? 0 : shard_of(tables[t].keys[i], shards));
            ++counts[t][owners[t][i]];
        }
    });
    std::vector<Shipment> out(shards);
    std::vector<std::vector<size_t>> next(tables.size(), std::vector<size_t>(shards));
    for (size_t s = 0; s < shards; ++s) {
        size_t total = 0;
        for (size_t t = 0; t < tables.size(); ++t) {
            next[t][s] = total;
            total += counts[t][s];
            out[s].counts.push_back(counts[t][s]);
            out[s].dims.push_back(tables[t].dim);
        }
        out[s].keys.resize(total);
        out[s].at.resize(total);
    }
    std::vector<size_t> reach(tables.size(), 0);
    parallel_for(tables.size(), [&](size_t t) {  // each its own ranges of every shipment
        const TableKeys& table = tables[t];
        for (size_t i = 0; i < table.n; ++i) {
            const size_t s = owners[t][i], to = next[t][s]++;
            const size_t position = table.positions == nullptr ? i : static_cast<size_t>(table.positions[i]);
            const size_t begin = table.start + position * table.dim;
            out[s].keys[to] = table.keys[i];
            out[s].at[to] = static_cast<int64_t>(begin);
            reach[t] = std::max(reach[t], begin + table.dim);
        }
    });
    for (Shipment& shipment : out)
        for (const size_t r : reach) shipment.reach = std::max(shipment.reach, r);
    return out;
}

// How a table's keys are packed: key = base + distance, distances `width` bytes each.
struct KeyHead {
    size_t count;
    uint64_t base;
    size_t width;
};

constexpr size_t kPackedSlack = 8;  // bytes behind the last key, so that whole words may be read and written

struct PackedKeys {
    std::vector<KeyHead> heads;
    std::vector<uint8_t> bytes;
};

inline PackedKeys pack_keys(const int64_t* keys, const std::vector<size_t>& counts) {
    PackedKeys out;
    size_t first = 0, total = 0;
    for (const size_t n : counts) {
        int64_t least = n == 0 ? 0 : keys[first], most = least;
        for (size_t i = 0; i < n; ++i) {
            least = std::min(least, keys[first + i]);
            most = std::max(most, keys[first + i]);
        }
        const uint64_t range = static_cast<uint64_t>(most) - static_cast<uint64_t>(least);
        const size_t width = std::max<size_t>(1, (static_cast<size_t>(std::bit_width(range)) + 7) / 8);
        out.heads.push_back({n, static_cast<uint64_t>(least), width});
        first += n;
        total += n * width;
    }
    out.bytes.assign(total + kPackedSlack, 0);
    uint8_t* to = out.bytes.data();
    const int64_t* from = keys;
    for (const KeyHead& head : out.heads)
        for (size_t i = 0; i < head.count; ++i, to += head.width) {
            const uint64_t distance = static_cast<uint64_t>(*from++) - head.base;
            std::memcpy(to, &distance, 8);
        }
    return out;
}

// Throws unless the bytes are those of the heads. Wrong heads cannot make it read outside: all sizes are summed up first.
inline std::vector<int64_t> unpack_keys(const std::vector<KeyHead>& heads, const uint8_t* bytes, size_t size) {
    size_t keys = 0, total = kPackedSlack;
    for (const KeyHead& head : heads) {
        if (head.width < 1 || head.width > 8 || head.count > size)
            throw std::invalid_argument("the packed keys have a width or a count that cannot be");
        keys += head.count;
        total += head.count * head.width;
    }
    if (total != size) throw std::invalid_argument("the packed keys are not as long as they say");
    std::vector<int64_t> out(keys);
    int64_t* to = out.data();
    for (const KeyHead& head : heads) {
        const uint64_t mask = head.width == 8 ? ~uint64_t{0} : (uint64_t{1} << (8 * head.width)) - 1;
        for (size_t i = 0; i < head.count; ++i, bytes += head.width) {
            uint64_t distance;
            std::memcpy(&distance, bytes, 8);
            *to++ = static_cast<int64_t>(head.base + (distance & mask));
        }
    }
    return out;
}

struct Summed {
    std::vector<int64_t> keys;
    std::unique_ptr<float[]> grads;
};

// One gradient for each distinct key of one table: those of keys that stand several times are added in their order.
inline Summed sum_by_key(const int64_t* keys, const float* const* grads, size_t n, size_t dim) {
    const Unique unique = dedup(keys, n);
    Summed out{{unique.keys.data(), unique.keys.data() + unique.count},
               std::unique_ptr<float[]>(new float[unique.count * dim])};
    constexpr size_t kBlock = 1024;
    parallel_for((unique.count + kBlock - 1) / kBlock, [&](size_t b) {  // each its own keys
        for (size_t u = b * kBlock; u < std::min(unique.count, (b + 1) * kBlock); ++u) {
            float* sum = out.grads.get() + u * dim;
            const auto begin = static_cast<size_t>(unique.starts[u]), end = static_cast<size_t>(unique.starts[u + 1]);
            copy_floats(sum, grads[unique.order[begin]], dim);
            for (size_t k = begin + 1; k < end; ++k) {
                const float* grad = grads[unique.order[k]];
                for (size_t j = 0; j < dim; ++j) sum[j] += grad[j];
            }
        }
    });
    return out;
}

}  // namespace hotrow
