// A count-min sketch with conservative update: how often was a key seen, in fixed memory. It never counts too low.
// Two rows of saturating bytes; a key raises only the smaller of its two counters, which keeps the error down.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "hash.hpp"

namespace hotrow {

class Sketch {
public:
    explicit Sketch(size_t bytes = 0) : own_(bytes / 2 * 2), counters_(own_) {}
    explicit Sketch(std::span<uint8_t> counters) : counters_(counters) {}  // that somebody else keeps
    Sketch(const Sketch&) = delete;
    Sketch& operator=(const Sketch&) = delete;

    // Counts one more use of the key and says how often it was seen, this time included.
    uint8_t count(int64_t key) {
        const size_t width = counters_.size() / 2;
        const uint64_t h = mix(hash_key(key) ^ 0xD1B54A32D192ED03ull);
        uint8_t& a = counters_[scale_to(h, width)];
        uint8_t& b = counters_[width + scale_to(mix(h), width)];
        const auto least = std::min(a, b);
        if (least == 255) return 255;
        const auto more = static_cast<uint8_t>(least + 1);
        a = std::max(a, more);
        b = std::max(b, more);
        return more;
    }

    std::span<uint8_t> counters() const { return counters_; }

private:
    std::vector<uint8_t> own_;
    std::span<uint8_t> counters_;
};

}  // namespace hotrow
