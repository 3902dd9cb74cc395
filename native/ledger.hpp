// `Ledger`: the rows that caches wrote back last, with their new clocks. It spares caches to ask whether their rows are still
// good: an answer says what others changed since the cache's last exchange, as far as that can matter to it. A copy's
// clock is at least 0, so a row whose clock is within the bound is good everywhere.
#pragma once

#include <cstdint>
#include <mutex>
#include <random>
#include <vector>

namespace hotrow {

// The rows written back last, in the order it happened; a ring of a few megabytes at most.
class Ledger {
public:
    struct Entry {
        int64_t key;
        uint64_t client;
        uint32_t clock, table;
    };
    struct Since {
        uint64_t position;
        bool behind;  // not everything since then is known any more
        std::vector<Entry> entries;
    };

    Ledger() {
        std::random_device device;
        epoch_ = (uint64_t{device()} << 32 | device()) | 1;
    }

    uint64_t epoch() const { return epoch_; }

    void append(const std::vector<Entry>& entries) {
        std::lock_guard lock(mutex_);
        for (const Entry& e : entries) {
            if (ring_.size() < kMost)
                ring_.push_back(e);
            else
                ring_[end_ % kMost] = e;
            ++end_;
        }
    }

    // What others than `client` wrote back since `position`, as far as it is past `bound`.
    Since since(uint64_t epoch, uint64_t position, uint64_t client, uint32_t bound) const {
        std::lock_guard lock(mutex_);
        Since out{end_, false, {}};
        if (epoch != epoch_ || position > end_ || end_ - position > ring_.size()) {
            out.behind = true;
            return out;
        }
        for (uint64_t at = position; at < end_; ++at) {
            const Entry& e = ring_[at % kMost];
            if (e.client != client && e.clock > bound) out.entries.push_back(e);
        }
        return out;
    }

private:
    static constexpr size_t kMost = 1 << 18;

    mutable std::mutex mutex_;
    uint64_t epoch_ = 0, end_ = 0;
    std::vector<Entry> ring_;
};

}  // namespace hotrow
