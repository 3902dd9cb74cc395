// How often each key was seen: exact up to `limit` distinct keys, then the summary of Misra and Gries in the same table.
//
// A new key that does not fit makes all counters smaller by the one in the middle and drops those that reach zero. Such a cut
// takes at least (limit / 2 + 1) times its step from what was counted, so the steps of all cuts together, `error`, are at
// most (total - kept) / (limit / 2 + 1). A key's true count is never below its counter and never more than `error` above.
// From the first cut on, HyperLogLog registers remember how many distinct keys there were.
//
// One counter is 16 bytes in a table at most three quarters full; a cut takes 16 bytes a counter more while it lasts.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "hash.hpp"
#include "memory.hpp"

namespace hotrow {

struct Counter {
    int64_t key;
    int64_t count;  // 0: the slot is free
};

struct CountClasses {
    std::vector<int64_t> counts;  // falling
    std::vector<int64_t> keys;    // how many keys have that count
};

class Counts {
public:
    static constexpr int kRegisterBits = 14;

    explicit Counts(size_t limit) : limit_(limit) {
        if (limit == 0) throw std::invalid_argument("counts need room for at least one key");
        reset(slots_for(std::min<size_t>(limit, 512)));
    }

    // Each key counts once, or times[i] times.
    void add(const int64_t* keys, const int64_t* times, size_t n) {
        for (size_t i = 0; times != nullptr && i < n; ++i)
            if (times[i] < 0) throw std::invalid_argument("a key cannot be used less than zero times");
        std::lock_guard lock(mutex_);
        constexpr size_t kAhead = 64;  // slots asked for before the first of them is needed
        uint64_t hashes[kAhead];
        for (size_t from = 0; from < n; from += kAhead) {
            const size_t block = std::min(kAhead, n - from);
            for (size_t i = 0; i < block; ++i) {
                hashes[i] = hash_key(keys[from + i]);
                __builtin_prefetch(&table()[hashes[i] & mask_], 1);
            }
            for (size_t i = 0; i < block; ++i) {
                const int64_t more = times == nullptr ? 1 : times[from + i];
                if (more == 0) continue;
                count(keys[from + i], hashes[i], more);
                total_ += more;
                if (used_ > limit_) {
                    start_registers();
                    cut(limit_ / 2);
                }
            }
        }
    }

    // What another one counted: its counters, all it saw, how far its counters may be too low, and its registers if it has any.
    void merge(const int64_t* keys, const int64_t* counts, size_t n, int64_t total, int64_t error,
               const uint8_t* registers) {
        std::lock_guard lock(mutex_);
        for (size_t i = 0; i < n; ++i)
            if (counts[i] < 1) throw std::invalid_argument("a counter is below one");
        if (registers != nullptr) {
            start_registers();
            for (size_t r = 0; r < registers_.size(); ++r) registers_[r] = std::max(registers_[r], registers[r]);
        }
        for (size_t i = 0; i < n; ++i) count(keys[i], hash_key(keys[i]), counts[i]);
        total_ += total;
        error_ += error;
        if (used_ > limit_) {  // all counters of both are here: what is taken off is as little as can be
            start_registers();
            cut(limit_);
        }
    }

    void of(const int64_t* keys, size_t n, int64_t* out) const {
        std::lock_guard lock(mutex_);
        for (size_t i = 0; i < n; ++i) {
            const Counter& found = table()[find(keys[i], hash_key(keys[i]))];
            out[i] = found.count;
        }
    }

    // Keys and counters of at least `least`, in no order.
    std::pair<std::vector<int64_t>, std::vector<int64_t>> above(int64_t least) const {
        std::lock_guard lock(mutex_);
        least = std::max<int64_t>(least, 1);
        size_t n = 0;
        for (size_t s = 0; s <= mask_; ++s) n += table()[s].count >= least;
        std::pair<std::vector<int64_t>, std::vector<int64_t>> out;
        out.first.reserve(n);
        out.second.reserve(n);
        for (size_t s = 0; s <= mask_; ++s) {
            const Counter& c = table()[s];
            if (c.count < least) continue;
            out.first.push_back(c.key);
            out.second.push_back(c.count);
        }
        return out;
    }

    CountClasses classes() const {
        std::lock_guard lock(mutex_);
        constexpr int64_t kSmall = 1 << 16;  // nearly all counts are small: those are tallied, the others sorted
        std::vector<int64_t> small(kSmall, 0), large;
        for (size_t s = 0; s <= mask_; ++s) {
            const int64_t count = table()[s].count;
            if (count >= kSmall)
                large.push_back(count);
            else
                ++small[count];
        }
        std::sort(large.begin(), large.end(), std::greater<>());
        CountClasses out;
        for (const int64_t count : large) {
            if (out.counts.empty() || out.counts.back() != count) {
                out.counts.push_back(count);
                out.keys.push_back(0);
            }
            ++out.keys.back();
        }
        for (int64_t count = kSmall - 1; count > 0; --count) {
            if (small[count] == 0) continue;
            out.counts.push_back(count);
            out.keys.push_back(small[count]);
        }
        return out;
    }

    size_t limit() const { return limit_; }
    size_t used() const {
        std::lock_guard lock(mutex_);
        return used_;
    }
    size_t bytes() const {
        std::lock_guard lock(mutex_);
        return (mask_ + 1) * sizeof(Counter) + registers_.size();
    }
    int64_t total() const {
        std::lock_guard lock(mutex_);
        return total_;
    }
    int64_t error() const {
        std::lock_guard lock(mutex_);
        return error_;
    }
    bool exact() const {
        std::lock_guard lock(mutex_);
        return registers_.empty();
    }
    std::vector<uint8_t> registers() const {  // none while counts are exact
        std::lock_guard lock(mutex_);
        return registers_;
    }

private:
    Counter* table() const { return reinterpret_cast<Counter*>(memory_.data()); }

    static size_t slots_for(size_t keys) { return std::bit_ceil((keys + 1) * 4 / 3 + 1); }

    void reset(size_t slots) {
        memory_ = Memory(slots * sizeof(Counter));
        mask_ = slots - 1;
        used_ = 0;
    }

    size_t find(int64_t key, uint64_t hash) const {
        size_t s = hash & mask_;
        while (table()[s].count != 0 && table()[s].key != key) s = (s + 1) & mask_;
        return s;
    }

    void count(int64_t key, uint64_t hash, int64_t more) {
        Counter* c = &table()[find(key, hash)];
        if (c->count == 0) {
            if ((used_ + 1) * 4 > (mask_ + 1) * 3) {
                grow();
                c = &table()[find(key, hash)];
            }
            c->key = key;
            ++used_;
            if (!registers_.empty()) remember(hash);
        }
        c->count += more;
    }

    void grow() {
        const Memory old = std::move(memory_);
        const auto* from = reinterpret_cast<const Counter*>(old.data());
        const size_t slots = mask_ + 1;
        reset(slots * 2);
        for (size_t s = 0; s < slots; ++s)
            if (from[s].count != 0) put(from[s]);
    }

    void put(const Counter& counter) {
        table()[find(counter.key, hash_key(counter.key))] = counter;
        ++used_;
    }

    // Leaves at most `keep` counters: all are made smaller by the largest of the others.
    void cut(size_t keep) {
        std::vector<int64_t> counts;
        counts.reserve(used_);
        for (size_t s = 0; s <= mask_; ++s)
            if (table()[s].count != 0) counts.push_back(table()[s].count);
        std::nth_element(counts.begin(), counts.begin() + static_cast<std::ptrdiff_t>(keep), counts.end(), std::greater<>());
        const int64_t step = counts[keep];
        counts = {};
        std::vector<Counter> left;
        left.reserve(keep);
        for (size_t s = 0; s <= mask_; ++s)
            if (table()[s].count > step) left.push_back({table()[s].key, table()[s].count - step});
        error_ += step;
        const size_t slots = std::min(mask_ + 1, slots_for(limit_));
        if (slots == mask_ + 1) {
            std::fill_n(table(), slots, Counter{0, 0});
            used_ = 0;
        } else {
            reset(slots);
        }
        for (const Counter& counter : left) put(counter);
    }

    void start_registers() {
        if (!registers_.empty()) return;
        registers_.assign(size_t{1} << kRegisterBits, 0);
        for (size_t s = 0; s <= mask_; ++s)
            if (table()[s].count != 0) remember(hash_key(table()[s].key));
    }

    void remember(uint64_t hash) {
        const uint64_t rest = hash << kRegisterBits | uint64_t{1} << (kRegisterBits - 1);
        auto& held = registers_[hash >> (64 - kRegisterBits)];
        held = std::max(held, static_cast<uint8_t>(std::countl_zero(rest) + 1));
    }

    const size_t limit_;
    Memory memory_;
    size_t mask_ = 0, used_ = 0;
    int64_t total_ = 0, error_ = 0;
    std::vector<uint8_t> registers_;
    mutable std::mutex mutex_;
};

}  // namespace hotrow
