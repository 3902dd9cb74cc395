// Which keys the batches in flight look up: those that are fetched and whose update is not applied yet. A key has one bit
// for each of them, so entering, leaving and asking cost one search a key, however many batches there are. 24 bytes a key
// and its place in the index. One lock for all: the threads that fetch and update are two, and hold it for a batch's keys.
#pragma once

#include <bit>
#include <cstdint>
#include <mutex>
#include <vector>

#include "index.hpp"

namespace hotrow {

class InFlight {
public:
    static constexpr size_t kMost = 128;  // batches at once; numbers of batches may grow for ever

    // From now on `batch` is in flight with these keys. found[c] grows by the keys that c other batches in flight have.
    void enter(const int64_t* keys, size_t n, uint64_t batch, int64_t* found) {
        const std::lock_guard lock(mutex_);
        const Bits own = bits(batch, batch + 1);
        for (size_t i = 0; i < n; ++i) {
            Entry& entry = entries_[find_or_insert(keys[i])];
            const uint64_t low = entry.bits.low & ~own.low, high = entry.bits.high & ~own.high;
            ++found[std::popcount(low) + std::popcount(high)];
            entry.bits.low |= own.low;
            entry.bits.high |= own.high;
        }
    }

    // The update of `batch` is applied. A key may be given twice, or have left before.
    void leave(const int64_t* keys, size_t n, uint64_t batch) {
        const std::lock_guard lock(mutex_);
        const Bits own = bits(batch, batch + 1);
        for (size_t i = 0; i < n; ++i) {
            const uint64_t hash = hash_key(keys[i]);
            const uint32_t slot = find(keys[i], hash);
            if (slot == kNoSlot) continue;
            Entry& entry = entries_[slot];
            entry.bits.low &= ~own.low;
            entry.bits.high &= ~own.high;
            if (entry.bits.low != 0 || entry.bits.high != 0) continue;
            index_.erase(hash, slot);
            free_.push_back(slot);
        }
    }

    // The positions of those keys that a batch from `first` up to `last` has too, or has not if `without`.
    std::vector<int64_t> shared(const int64_t* keys, size_t n, uint64_t first, uint64_t last, bool without) const {
        const std::lock_guard lock(mutex_);
        const Bits wanted = bits(first, last);
        std::vector<int64_t> out;
        for (size_t i = 0; i < n; ++i) {
            const uint32_t slot = find(keys[i], hash_key(keys[i]));
            const bool has = slot != kNoSlot && ((entries_[slot].bits.low & wanted.low) != 0 ||
                                                 (entries_[slot].bits.high & wanted.high) != 0);
            if (has != without) out.push_back(static_cast<int64_t>(i));
        }
        return out;
    }

    size_t size() const {
        const std::lock_guard lock(mutex_);
        return entries_.size() - free_.size();
    }

private:
    struct Bits {
        uint64_t low = 0, high = 0;
    };
    struct Entry {
        int64_t key;
        Bits bits;
    };

    static Bits bits(uint64_t first, uint64_t last) {
        Bits out;
        for (uint64_t batch = first; batch < last; ++batch) {
            const uint64_t at = batch % kMost;
            (at < 64 ? out.low : out.high) |= uint64_t{1} << (at % 64);
        }
        return out;
    }

    uint32_t find(int64_t key, uint64_t hash) const {
        if (index_.buckets() == 0) return kNoSlot;
        return index_.find(hash, [&](uint32_t slot) { return entries_[slot].key == key; });
    }

    uint32_t find_or_insert(int64_t key) {
        const uint64_t hash = hash_key(key);
        if (const uint32_t slot = find(key, hash); slot != kNoSlot) return slot;
        if (free_.empty()) {
            if (entries_.size() + 1 > index_.capacity()) grow();
            free_.push_back(static_cast<uint32_t>(entries_.size()));
            entries_.emplace_back();
        }
        const uint32_t slot = free_.back();
        free_.pop_back();
        entries_[slot] = {key, {}};
        index_.insert(hash, slot);
        return slot;
    }

    // Only when no entry is free: all of them are in the index.
    void grow() {
        index_.reset(Index::buckets_for(2 * entries_.size() + 1024));
        for (size_t i = 0; i < entries_.size(); ++i)
            index_.insert(hash_key(entries_[i].key), static_cast<uint32_t>(i));
    }

    mutable std::mutex mutex_;
    Index index_;
    std::vector<Entry> entries_;
    std::vector<uint32_t> free_;
};

}  // namespace hotrow
