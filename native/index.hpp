// From a key's hash to the slot of its row: open addressing in buckets of one cache line, so that a lookup costs
// one miss here and one at the row itself. A bucket holds 12 one-byte tags, compared at once, and 12 slots. The
// key is not stored again: whoever asks compares it in the row, which is needed next anyway.
//
// A key that finds its bucket full goes to the next one, and every full bucket on the way counts it in
// `overflow`; a search ends at the first bucket that nobody passed. Erasing counts back: there are no tombstones.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "hash.hpp"
#include "memory.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hotrow {

constexpr uint32_t kNoSlot = 0xFFFFFFFF;

class Index {
public:
    size_t buckets() const { return count_; }
    size_t bytes() const { return bytes_for(count_); }
    // More than this many keys and the table wants to be rebuilt larger: 80% full.
    size_t capacity() const { return count_ * kWidth * 4 / 5; }

    static size_t buckets_for(size_t keys) { return keys * 5 / (4 * kWidth) + 1; }

    void reset(size_t buckets) {
        auto own = std::make_shared<Memory>(buckets * sizeof(Bucket));  // if this throws, the old buckets are still there
        reset(buckets, {own, own->data()});
    }
    // In memory of its own or a part of some; zeros.
    void reset(size_t buckets, std::shared_ptr<std::byte> memory) {
        memory_ = std::move(memory);
        count_ = buckets;
    }
    static size_t bytes_for(size_t buckets) { return buckets * sizeof(Bucket); }

    void prefetch(uint64_t hash) const { ask_for(&at(home(hash))); }

    // The first slot in the home bucket whose tag fits: nearly always the right one. For prefetching.
    uint32_t candidate(uint64_t hash) const {
        if (count_ == 0) return kNoSlot;
        const Bucket& bucket = at(home(hash));
        const uint32_t fits = bucket.matches(tag(hash));
        return fits == 0 ? kNoSlot : bucket.slot[__builtin_ctz(fits)];
    }

    // The slot for which is_it(slot) holds, or kNoSlot.
    template <class IsIt>
    uint32_t find(uint64_t hash, IsIt is_it) const {
        size_t b = home(hash);
        for (size_t left = count_; left > 0; --left, b = next(b)) {  // bounded: all buckets may have been passed once
            const Bucket& bucket = at(b);
            for (uint32_t fits = bucket.matches(tag(hash)); fits != 0; fits &= fits - 1) {
                const uint32_t slot = bucket.slot[__builtin_ctz(fits)];
                if (is_it(slot)) return slot;
            }
            if (bucket.overflow == 0) break;
        }
        return kNoSlot;
    }

    // The key must not be in, and there must be room.
    void insert(uint64_t hash, uint32_t slot) {
        for (size_t b = home(hash);; b = next(b)) {
            Bucket& bucket = at(b);
            if (const uint32_t empty = bucket.matches(0); empty != 0) {
                const int i = __builtin_ctz(empty);
                bucket.tag[i] = tag(hash);
                bucket.slot[i] = slot;
                return;
            }
            if (bucket.overflow != 0xFFFF) ++bucket.overflow;
        }
    }

    // The key must be in, at this slot. A saturated overflow count stays: searches pass on, none goes wrong.
    void erase(uint64_t hash, uint32_t slot) {
        for (size_t b = home(hash);; b = next(b)) {
            Bucket& bucket = at(b);
            for (uint32_t fits = bucket.matches(tag(hash)); fits != 0; fits &= fits - 1) {
                const int i = __builtin_ctz(fits);
                if (bucket.slot[i] == slot) {
                    bucket.tag[i] = 0;
                    return;
                }
            }
            if (bucket.overflow != 0xFFFF) --bucket.overflow;
        }
    }

    // Calls visit(slot) for every key whose hash is less than `length` past `from`, round the end, and for some others.
    // At most half of all hashes.
    template <class Visit>
    void for_range(uint64_t from, uint64_t length, Visit visit) const {
        if (count_ == 0 || length == 0) return;
        const size_t last = home(from + (length - 1));
        bool past = false;  // the last home bucket; keys it had no room for may follow
        size_t b = home(from);
        for (size_t left = count_; left > 0; --left, b = next(b)) {
            const Bucket& bucket = at(b);
            for (uint32_t used = ~bucket.matches(0) & 0xFFF; used != 0; used &= used - 1) visit(bucket.slot[__builtin_ctz(used)]);
            past |= b == last;
            if (past && bucket.overflow == 0) return;
        }
    }

private:
    static constexpr size_t kWidth = 12;

    struct alignas(64) Bucket {
        uint8_t tag[kWidth];  // 0: empty
        uint16_t overflow;
        uint16_t unused;
        uint32_t slot[kWidth];

        // A bit for every place whose tag is t.
        uint32_t matches(uint8_t t) const {
#if defined(__SSE2__)
            const __m128i tags = _mm_load_si128(reinterpret_cast<const __m128i*>(tag));
            return static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(tags, _mm_set1_epi8(static_cast<char>(t))))) &
                   0xFFF;
#else
            uint32_t bits = 0;
            for (size_t i = 0; i < kWidth; ++i) bits |= static_cast<uint32_t>(tag[i] == t) << i;
            return bits;
#endif
        }
    };
    static_assert(sizeof(Bucket) == 64);

    static uint8_t tag(uint64_t hash) {
        const auto low = static_cast<uint8_t>(hash);
        return low == 0 ? 1 : low;
    }
    size_t home(uint64_t hash) const { return scale_to(hash, count_); }
    size_t next(size_t b) const { return b + 1 == count_ ? 0 : b + 1; }
    Bucket& at(size_t b) const { return reinterpret_cast<Bucket*>(memory_.get())[b]; }

    std::shared_ptr<std::byte> memory_;
    size_t count_ = 0;
};

}  // namespace hotrow
