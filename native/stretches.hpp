// Bags of one feature as windows that may overlap: a history that slides is one stretch of keys with a window for each
// sample. The stored keys that lie in some window are numbered in their order, without those that lie in none: a key
// nobody looks up gets no row and no update. Where windows leave no gap, nothing is copied.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "grouping.hpp"

namespace hotrow {

struct Stretches {
    const int64_t* keys = nullptr;  // [stored], each once
    size_t stored = 0;
    std::vector<int64_t> begins;  // [samples]: where in `keys` each window begins

    Stretches(const int64_t* values, const int64_t* from, const int64_t* offsets, size_t samples) : begins(samples, 0) {
        int64_t low = INT64_MAX, high = 0;
        for (size_t s = 0; s < samples; ++s) {
            const int64_t length = offsets[s + 1] - offsets[s];
            if (length == 0) continue;
            low = std::min(low, from[s]);
            high = std::max(high, from[s] + length);
        }
        if (high == 0) return;  // all are empty
        const auto extent = static_cast<size_t>(high - low);
        if (extent > 0x7FFFFFFF) throw std::length_error("a feature's windows lie in more than 2^31 keys");
        const std::vector<int32_t> number = numbers(from, offsets, samples, low, extent);
        stored = static_cast<size_t>(number[extent]);
        keys = values + low;
        if (stored != extent) {
            compact_.reserve(stored);
            for (size_t p = 0; p < extent; ++p)
                if (number[p + 1] != number[p]) compact_.push_back(keys[p]);
            keys = compact_.data();
        }
        for (size_t s = 0; s < samples; ++s)
            if (offsets[s + 1] != offsets[s]) begins[s] = number[static_cast<size_t>(from[s] - low)];
    }
    Stretches(const Stretches&) = delete;

private:
    // For each place how many keys before it lie in a window.
    static std::vector<int32_t> numbers(const int64_t* from, const int64_t* offsets, size_t samples, int64_t low,
                                        size_t extent) {
        std::vector<int32_t> open(extent + 1, 0);  // windows that begin at a place, less those that end there
        for (size_t s = 0; s < samples; ++s) {
            const int64_t length = offsets[s + 1] - offsets[s];
            if (length == 0) continue;
            ++open[static_cast<size_t>(from[s] - low)];
            --open[static_cast<size_t>(from[s] - low + length)];
        }
        int32_t windows = 0, before = 0;
        for (int32_t& place : open) {
            windows += place;
            place = before;
            before += windows > 0 ? 1 : 0;
        }
        return open;
    }

    std::vector<int64_t> compact_;
};

// A feature's share in spreading a table's lookups from stored keys to windows.
struct Spread {
    size_t hashed, lookups;
    const int64_t* begins;  // of windows, among its hashed keys; null: one lookup a hashed key
    const int64_t* offsets;
    size_t samples;
};

// The same unique keys, with a lookup for each key of each window.
inline Unique spread(Unique stored, const std::vector<Spread>& parts) {
    size_t lookups = 0;
    for (const Spread& part : parts) lookups += part.lookups;
    if (lookups > 0x7FFFFFFF) throw std::length_error("a batch looks up more than 2^31 keys in one table");
    Unique out{stored.count, lookups, std::move(stored.keys), Buffer<int32_t>(lookups), Buffer<int32_t>(stored.count + 1),
               Buffer<int32_t>(lookups)};
    const int32_t* from = stored.inverse.data();
    int32_t* to = out.inverse.data();
    for (const Spread& part : parts) {
        if (part.begins == nullptr) {
            to = std::copy_n(from, part.hashed, to);
        } else {
            for (size_t s = 0; s < part.samples; ++s)
                to = std::copy_n(from + part.begins[s], part.offsets[s + 1] - part.offsets[s], to);
        }
        from += part.hashed;
    }
    std::vector<int32_t> next(out.count + 1, 0);
    for (size_t i = 0; i < lookups; ++i) ++next[static_cast<size_t>(out.inverse[i]) + 1];
    for (size_t u = 0; u < out.count; ++u) next[u + 1] += next[u];
    std::copy_n(next.data(), out.count + 1, out.starts.data());
    for (size_t i = 0; i < lookups; ++i) out.order[next[static_cast<size_t>(out.inverse[i])]++] = static_cast<int32_t>(i);
    return out;
}

}  // namespace hotrow
