// The grouping of a batch: for each table its unique keys, and which lookups share a row. It is made once, ahead
// of the step, and used by the fetch, by pooling, by its gradient and by every exchange. Because of it the
// gradient of a row is summed by one thread in a fixed order: no sort, no atomics, the same bits on any machine.
//
//     unique[U]     the table's distinct keys
//     inverse[L]    for each lookup its unique key
//     order[L]      the lookups sorted by unique key, in their own order within one
//     starts[U+1]   where in `order` each unique key's lookups begin
//
// A table's lookups are those of its features, one after another, in the order of the batch's groups.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "hash.hpp"
#include "threads.hpp"

namespace hotrow {

// An array that is not filled before use: everything here is written in full anyway.
template <class T>
class Buffer {
public:
    Buffer() = default;
    explicit Buffer(size_t n) : data_(new T[n]), size_(n) {}
    T* data() const { return data_.get(); }
    size_t size() const { return size_; }
    T& operator[](size_t i) const { return data_[i]; }

private:
    std::unique_ptr<T[]> data_;
    size_t size_ = 0;
};

struct Unique {
    size_t count = 0, lookups = 0;
    Buffer<int64_t> keys;
    Buffer<int32_t> inverse, starts, order;
};

// Distinct keys of keys[n], in order of first appearance. Entry is what the numbers 1 to n fit in: small ones keep the
// table in the first cache. It writes unique[], local[n] and counts[]; returns how many.
template <class Entry>
size_t dedup_in_cache(const int64_t* keys, size_t n, int64_t* unique, int32_t* local, int32_t* counts,
                             std::vector<Entry>& table) {
    const size_t size = std::max<size_t>(std::bit_ceil(2 * n), 2);
    const int shift = 64 - std::countr_zero(size);
    table.assign(size, 0);
    std::fill_n(counts, n, 0);
    uint32_t found = 0;
    for (size_t i = 0; i < n; ++i) {
        // Half the keys of a batch are new and half are not, as far as a processor can guess: so both take the same
        // path, a new key by standing in line as the next unique one before it is looked for.
        const int64_t key = unique[found] = keys[i];
        size_t at = (static_cast<uint64_t>(key) * kGolden) >> shift;
        uint32_t number;
        for (;; at = (at + 1) & (size - 1)) {
            number = table[at] == 0 ? found : table[at] - 1;
            if (unique[number] == key) break;
        }
        table[at] = static_cast<Entry>(number + 1);
        local[i] = static_cast<int32_t>(number);
        ++counts[number];
        found += number == found ? 1 : 0;
    }
    return found;
}

struct Scratch {
    std::vector<uint16_t> table;
    std::vector<int32_t> counts;
};

// Everything in one go, for as many keys as a core's cache holds.
inline Unique dedup_small(const int64_t* keys, size_t n, Scratch& s) {
    Buffer<int64_t> unique(n);
    Unique out{0, n, {}, Buffer<int32_t>(n), {}, Buffer<int32_t>(n)};
    s.counts.resize(n);
    out.count = dedup_in_cache(keys, n, unique.data(), out.inverse.data(), s.counts.data(), s.table);
    out.keys = std::move(unique);
    out.starts = Buffer<int32_t>(out.count + 1);
    int32_t sum = 0;
    for (size_t u = 0; u < out.count; ++u) {
        out.starts[u] = sum;
        sum += s.counts[u];
        s.counts[u] = out.starts[u];
    }
    out.starts[out.count] = sum;
    for (size_t i = 0; i < n; ++i) out.order[s.counts[out.inverse[i]]++] = static_cast<int32_t>(i);
    return out;
}

// The same for many keys: first split by hash into parts that fit a core's cache, then each part on its own. Parts do
// not share a key, so threads do not share a unique one.
inline Unique dedup_large(const int64_t* keys, size_t n) {
    const size_t parts = std::min<size_t>(std::bit_ceil(n / 4096), 2048);
    const int shift = 64 - std::countr_zero(parts);
    const size_t blocks = 64, block = (n + blocks - 1) / blocks;
    const auto part_of = [&](int64_t key) { return hash_key(key) >> shift; };

    std::vector<uint32_t> at(blocks * parts);  // per block and part: how many, then where they go
    parallel_for(blocks, [&](size_t b) {
        uint32_t* mine = at.data() + b * parts;
        for (size_t i = b * block; i < std::min(n, (b + 1) * block); ++i) ++mine[part_of(keys[i])];
    });
    std::vector<uint32_t> begin(parts + 1);
    uint32_t sum = 0;
    for (size_t p = 0; p < parts; ++p) {
        begin[p] = sum;
        for (size_t b = 0; b < blocks; ++b) {
            const uint32_t count = at[b * parts + p];
            at[b * parts + p] = sum;
            sum += count;
        }
    }
    begin[parts] = sum;
    Buffer<int64_t> sorted(n), unique(n);
    Buffer<int32_t> position(n), local(n), counts(n);
    parallel_for(blocks, [&](size_t b) {
        uint32_t* mine = at.data() + b * parts;
        for (size_t i = b * block; i < std::min(n, (b + 1) * block); ++i) {
            const uint32_t to = mine[part_of(keys[i])]++;
            sorted[to] = keys[i];
            position[to] = static_cast<int32_t>(i);
        }
    });
    std::vector<size_t> first(parts + 1, 0);
    parallel_for(parts, [&](size_t p) {
        thread_local std::vector<uint32_t> table;  // one key may fill a part
        const size_t from = begin[p];
        first[p + 1] = dedup_in_cache(sorted.data() + from, begin[p + 1] - from, unique.data() + from, local.data() + from,
                                      counts.data() + from, table);
    });
    for (size_t p = 0; p < parts; ++p) first[p + 1] += first[p];

    Unique out{first[parts], n, Buffer<int64_t>(first[parts]), Buffer<int32_t>(n), Buffer<int32_t>(first[parts] + 1),
               Buffer<int32_t>(n)};
    out.starts[out.count] = static_cast<int32_t>(n);
    parallel_for(parts, [&](size_t p) {
        const size_t from = begin[p], found = first[p + 1] - first[p];
        std::copy_n(unique.data() + from, found, out.keys.data() + first[p]);
        auto next = static_cast<int32_t>(from);
        for (size_t u = 0; u < found; ++u) {
            const int32_t count = counts[from + u];
            out.starts[first[p] + u] = counts[from + u] = next;
            next += count;
        }
        for (size_t i = from; i < begin[p + 1]; ++i) {
            out.inverse[position[i]] = static_cast<int32_t>(first[p]) + local[i];
            out.order[counts[from + local[i]]++] = position[i];
        }
    });
    return out;
}

constexpr size_t kSmallDedup = 1 << 15;

inline Unique dedup(const int64_t* keys, size_t n) {
    if (n > 0x7FFFFFFF) throw std::length_error("a batch looks up more than 2^31 keys in one table");
    if (n > kSmallDedup) return dedup_large(keys, n);
    thread_local Scratch scratch;
    return dedup_small(keys, n, scratch);
}

// Several sets of keys at once: large ones one after another on all cores, small ones side by side.
inline std::vector<Unique> dedup_all(const std::vector<std::pair<const int64_t*, size_t>>& sets) {
    std::vector<Unique> out(sets.size());
    std::vector<size_t> small;
    for (size_t t = 0; t < sets.size(); ++t) {
        if (sets[t].second > kSmallDedup)
            out[t] = dedup(sets[t].first, sets[t].second);
        else
            small.push_back(t);
    }
    parallel_for(small.size(), [&](size_t k) { out[small[k]] = dedup(sets[small[k]].first, sets[small[k]].second); });
    return out;
}

}  // namespace hotrow
