// Memory for the large arrays of a step, kept for the next one when they are let go. Fresh memory costs a page fault and
// a zeroed page every few kilobytes, and what a step makes is written far apart: so it is in huge pages too.
#pragma once

#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

#include "memory.hpp"

namespace hotrow {

class Spare {
public:
    static constexpr size_t kMost = size_t{256} << 20;  // bytes that are kept; what is let go beyond them is given back

    static Spare& get() {
        static Spare* spare = new Spare();  // leaked on purpose: arrays may be let go past the end of everything else
        return *spare;
    }

    // At least so many bytes, of any content.
    Memory take(size_t bytes) {
        {
            std::lock_guard lock(mutex_);
            for (size_t k = kept_.size(); k-- > 0;)  // the last one let go is in cache still
                if (kept_[k].size() >= bytes && kept_[k].size() / 2 <= bytes) {
                    Memory found = std::move(kept_[k]);
                    kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(k));
                    bytes_ -= found.size();
                    return found;
                }
        }
        return Memory(bytes);
    }

    void let_go(Memory memory) {
        std::vector<Memory> dropped;  // given back without the lock
        std::lock_guard lock(mutex_);
        bytes_ += memory.size();
        kept_.push_back(std::move(memory));
        while (bytes_ > kMost) {
            bytes_ -= kept_.front().size();
            dropped.push_back(std::move(kept_.front()));
            kept_.erase(kept_.begin());
        }
    }

    size_t bytes() {
        std::lock_guard lock(mutex_);
        return bytes_;
    }

private:
    std::mutex mutex_;
    std::vector<Memory> kept_;  // in the order they were let go
    size_t bytes_ = 0;
};

}  // namespace hotrow
