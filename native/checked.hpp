// Words of a mapped file that change seldom and must be what was written there, whatever the process was killed at.
//
// One sum is kept over all of them. Words that change together are written to a log first, with a sum of the log's own; then
// they are changed, and the log is void. Whoever opens the file next makes the changes of a log that is not void, once more or
// for the first time, and then adds all words up. So a byte that was altered meanwhile is found, and a kill is not taken for it.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include "hash.hpp"
#include "mapped.hpp"

namespace hotrow {

// For tests: HOTROW_DIE_AFTER=n kills the process at the n-th step of what must not be lost to a kill.
inline std::atomic<int64_t>& fuse() {
    static std::atomic<int64_t> steps{std::getenv("HOTROW_DIE_AFTER") == nullptr ? 0 : std::atoll(std::getenv("HOTROW_DIE_AFTER"))};
    return steps;
}
inline void burn() {
    if (fuse() > 0 && fuse().fetch_sub(1) == 1) kill(getpid(), SIGKILL);
}

class CheckedWords {
public:
    static constexpr size_t kMost = 160;  // words that change at once

    // What stands in the file beside the words.
    struct Log {
        uint64_t sum, pending, count;
        struct {
            uint64_t at, value;
        } changes[kMost];
    };

    CheckedWords() = default;
    CheckedWords(Log& log, uint64_t* words, size_t count) : log_(&log), words_(words), count_(count) {}

    // Sums up words that were just written into a new file.
    void begin() { log_->sum = total(); }

    // Whether the words are what they should be, once the changes that were under way are made.
    bool recover() {
        if (log_->pending != 0) {
            if (log_->count > kMost || log_->pending != log_sum()) return false;
            for (size_t k = 0; k < log_->count; ++k)
                if (log_->changes[k].at > count_) return false;
            apply();
        }
        return log_->sum == total();
    }

    // Notes that a word is to be changed. One after the other is noted, then all are made.
    void set(uint64_t& word, uint64_t value) {
        const auto at = static_cast<size_t>(&word - words_);
        for (size_t k = 0; k < noted_; ++k)
            if (log_->changes[k].at == at) {
                log_->changes[k].value = value;
                return;
            }
        if (noted_ + 1 >= kMost) throw std::logic_error("too many words change at once");
        log_->changes[noted_++] = {at, value};
    }

    void make_changes() {
        uint64_t sum = log_->sum;
        for (size_t k = 0; k < noted_; ++k) {
            const auto& c = log_->changes[k];
            sum += weight(c.at, c.value) - weight(c.at, words_[c.at]);
        }
        log_->changes[noted_++] = {count_, sum};
        log_->count = noted_;
        noted_ = 0;
        in_order();
        burn();
        log_->pending = log_sum();
        in_order();
        burn();
        apply();
    }

private:
    static uint64_t weight(size_t at, uint64_t value) { return mix(value + kGolden * (at + 1)); }

    uint64_t total() const {
        uint64_t out = 1;
        for (size_t i = 0; i < count_; ++i) out += weight(i, words_[i]);
        return out;
    }

    uint64_t log_sum() const {
        uint64_t out = mix(log_->count);
        for (size_t k = 0; k < log_->count; ++k)
            out += weight(2 * k, log_->changes[k].at) + weight(2 * k + 1, log_->changes[k].value);
        return out | 1;
    }

    void apply() {
        for (size_t k = 0; k < log_->count; ++k) {
            const auto& c = log_->changes[k];
            (c.at == count_ ? log_->sum : words_[c.at]) = c.value;
            if (k == 0) in_order(), burn();
        }
        in_order();
        log_->pending = 0;
        in_order();
    }

    Log* log_ = nullptr;
    uint64_t* words_ = nullptr;
    size_t count_ = 0, noted_ = 0;
};

}  // namespace hotrow
