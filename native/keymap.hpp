// From a fixed set of keys to their numbers, 0 to n - 1 in the order they were given: who holds a key, and where. Built once,
// read by many threads at once; a plan that changes gets a new one. 15 to 18 bytes a key.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "index.hpp"
#include "pooling.hpp"
#include "threads.hpp"

namespace hotrow {

class KeyMap {
public:
    KeyMap(const int64_t* keys, size_t n) : keys_(keys, keys + n) {
        if (n >= kNoSlot) throw std::length_error("a key map holds less than 2^32 keys");
        index_.reset(Index::buckets_for(n));
        for (size_t i = 0; i < n; ++i) {
            if (i + kAhead < n) index_.prefetch(hash_of(keys_[i + kAhead]));
            const uint64_t hash = hash_of(keys_[i]);
            if (find(keys_[i], hash) != kNoSlot) throw std::invalid_argument("a key stands twice among those to be mapped");
            index_.insert(hash, static_cast<uint32_t>(i));
        }
    }

    size_t size() const { return keys_.size(); }
    const std::vector<int64_t>& keys() const { return keys_; }

    // numbers[i] is that of keys[i], or -1. Threads write blocks of their own.
    void find(const int64_t* keys, size_t n, int32_t* numbers) const {
        constexpr size_t kBlock = 4096;
        parallel_for((n + kBlock - 1) / kBlock, [&](size_t b) {
            const size_t end = std::min(n, (b + 1) * kBlock);
            // Two stages ahead of the search: the bucket is asked for, then the key it is likely to lead to.
            for (size_t i = b * kBlock; i < end + 2 * kAhead; ++i) {
                if (i < end) index_.prefetch(hash_of(keys[i]));
                if (i >= b * kBlock + kAhead && i < end + kAhead) {
                    const uint32_t likely = index_.candidate(hash_of(keys[i - kAhead]));
                    if (likely != kNoSlot) __builtin_prefetch(&keys_[likely]);
                }
                if (i < b * kBlock + 2 * kAhead) continue;
                const int64_t key = keys[i - 2 * kAhead];
                numbers[i - 2 * kAhead] = static_cast<int32_t>(find(key, hash_of(key)));  // kNoSlot is -1
            }
        });
    }

private:
    static constexpr size_t kAhead = 16;

    // Not the row store's hash: who chooses keys in the order of that one, as a plan does among keys that are used equally
    // often, would fill one end of the index and make every search there long.
    static uint64_t hash_of(int64_t key) { return mix(hash_key(key)); }

    uint32_t find(int64_t key, uint64_t hash) const {
        return index_.find(hash, [&](uint32_t slot) { return keys_[slot] == key; });
    }

    std::vector<int64_t> keys_;
    Index index_;
};

// Where the rows of a batch are, for a place that holds some of each table's keys in slots of its own.
struct Placed {
    std::vector<int32_t> slots;  // of every lookup
    std::vector<int32_t> held;   // the numbers of the unique keys that are held there, counted through all maps
    std::vector<std::vector<int64_t>> others;  // for each table the unique keys that are not
    size_t hits = 0;                           // lookups whose row is held
};

// Where a place keeps a table's rows: the slot of the first, and the segment the table belongs to. Rows that are not held get
// slots too, for as long as the batch lasts: those of a segment one after another from its `behind` on, table after table.
struct Home {
    int32_t first;
    size_t segment;
};

inline Placed place(const Grouping& grouping, const std::vector<const KeyMap*>& maps, const std::vector<Home>& homes,
                    std::vector<int32_t> behind) {
    Placed out;
    out.others.resize(maps.size());
    std::vector<std::vector<int32_t>> numbers(maps.size()), held(maps.size());
    std::vector<size_t> hits(maps.size(), 0);
    std::vector<int32_t> before(1, 0);  // keys in the maps of earlier tables
    for (const KeyMap* map : maps) before.push_back(before.back() + static_cast<int32_t>(map->size()));
    parallel_for(maps.size(), [&](size_t t) {  // each its own table
        const Unique& unique = grouping.tables[t];
        numbers[t].resize(unique.count);
        maps[t]->find(unique.keys.data(), unique.count, numbers[t].data());
        for (size_t u = 0; u < unique.count; ++u)
            if (numbers[t][u] >= 0) {
                held[t].push_back(before[t] + numbers[t][u]);
                hits[t] += static_cast<size_t>(unique.starts[u + 1] - unique.starts[u]);
            } else {
                out.others[t].push_back(unique.keys[u]);
            }
    });
    for (const size_t of_table : hits) out.hits += of_table;
    std::vector<int32_t> next;
    for (size_t t = 0; t < maps.size(); ++t) {
        next.push_back(behind[homes[t].segment]);
        behind[homes[t].segment] += static_cast<int32_t>(out.others[t].size());
    }
    for (size_t t = 0; t < maps.size(); ++t) {
        int32_t other = next[t];
        for (int32_t& number : numbers[t]) number = number >= 0 ? homes[t].first + number : other++;
    }
    out.slots.resize(grouping.lookups());
    grouping.spread_numbers(numbers, out.slots.data());
    for (const auto& slots : held) out.held.insert(out.held.end(), slots.begin(), slots.end());
    return out;
}

}  // namespace hotrow
