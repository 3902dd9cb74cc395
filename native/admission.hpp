// Which keys get a row, and which rows make room for them.
//
// Looking for the very least valuable row would mean to read them all. Rows are sampled instead: those whose key's
// hash lies in one stretch, which the index can find, kSample for each that must go; the least valuable of these go.
// So evicting costs the same at any capacity and never takes long. Up to kExact rows all are looked at.
// The stretch depends on step and keys, and the choice on the rows in it, wherever they lie: a resumed run evicts the same.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "store.hpp"

namespace hotrow {

constexpr size_t kSample = 8;
constexpr size_t kExact = 4096;
constexpr size_t kSpare = 1024;  // rows evicted beyond what is needed, so that a few new keys do not evict each time

struct Candidate {
    uint64_t worth;
    int64_t key;
    uint32_t slot, part;
    bool operator<(const Candidate& o) const { return worth != o.worth ? worth < o.worth : key < o.key; }
};

// Rows that may go at step `now`, of those whose key's hash is less than `length` past `from`; with length 0 of all.
// The caller holds all locks; each part is worked on by one thread, and has its own stretch of what is found.
inline std::vector<Candidate> candidates(const Store& store, uint64_t from, uint64_t length, uint32_t now) {
    std::vector<uint32_t> slots[Store::kParts];
    parallel_for(Store::kParts, [&](size_t p) {
        const auto visit = [&](uint32_t slot) { slots[p].push_back(slot); };
        if (length == 0)
            store.part(p).for_each(visit);
        else
            store.part(p).for_range(from, length, visit);
    });
    size_t starts[Store::kParts + 1] = {}, ends[Store::kParts];
    for (size_t p = 0; p < Store::kParts; ++p) starts[p + 1] = starts[p] + slots[p].size();
    std::vector<Candidate> found(starts[Store::kParts]);
    parallel_for(Store::kParts, [&](size_t p) {
        constexpr size_t kAhead = 16;
        const Part& part = store.part(p);
        size_t at = starts[p];
        for (size_t i = 0; i < slots[p].size(); ++i) {
            if (i + kAhead < slots[p].size()) __builtin_prefetch(&part.header(slots[p][i + kAhead]));
            const Header& h = part.header(slots[p][i]);
            if (h.last >= now || (length != 0 && hash_key(h.key) - from >= length)) continue;
            const uint64_t worth = store.settings().lfu ? uint64_t{h.uses} << 32 | h.last : h.last;
            found[at++] = {store.expired(h, now) ? 0 : worth, h.key, slots[p][i], static_cast<uint32_t>(p)};
        }
        ends[p] = at;
    });
    auto end = found.begin();
    for (size_t p = 0; p < Store::kParts; ++p)
        end = std::copy(found.begin() + static_cast<ptrdiff_t>(starts[p]), found.begin() + static_cast<ptrdiff_t>(ends[p]), end);
    found.erase(end, found.end());
    return found;
}

// Erases rows of little value until at most `target` are left, but none that was used at step `now` or later.
inline void evict_to(Store& store, size_t target, uint32_t now, uint64_t draw) {
    const PartLocks locks(store);
    size_t count = 0;
    for (size_t p = 0; p < Store::kParts; ++p) count += store.part(p).rows();
    if (count <= target) return;
    size_t victims = count - target;
    std::vector<Candidate> found;
    for (size_t sample = kSample * victims;; sample *= 4) {  // again if most of them were used just now
        const bool all = sample > count / 2 || count <= kExact;
        const double share = static_cast<double>(sample) / static_cast<double>(count);
        found = candidates(store, mix(draw), all ? 0 : static_cast<uint64_t>(share * 0x1p64), now);
        if (all || found.size() >= kSample / 2 * victims) break;
    }
    victims = std::min(victims, found.size());
    std::nth_element(found.begin(), found.begin() + static_cast<ptrdiff_t>(victims), found.end());
    constexpr size_t kAhead = 16;
    for (size_t i = 0; i < victims; ++i) {
        if (i + kAhead < victims) store.part(found[i + kAhead].part).prefetch_bucket(hash_key(found[i + kAhead].key));
        store.part(found[i].part).erase(found[i].slot);
    }
}

// Room for up to `wanted` new rows, of which the number granted is returned.
inline size_t make_room(Store& store, size_t wanted, uint32_t now, uint64_t draw) {
    const size_t capacity = store.settings().capacity;
    if (store.rows() + wanted > capacity) {
        const size_t spare = std::max(wanted, std::min(capacity / 32, kSpare));
        evict_to(store, capacity - std::min(spare, capacity), now, draw);
    }
    const size_t left = store.rows();
    return left < capacity ? capacity - left : 0;
}

// A row past its time already reads as absent; this frees its memory, and reads every row to do so: a few times in each
// time to live, of what had expired at a multiple of that period, so that doing it again in a resumed run does nothing.
inline void forget_expired(Store& store, uint32_t now) {
    if (store.settings().ttl == 0) return;
    const uint32_t period = store.settings().ttl / 4 + 1, until = now / period * period;
    if (until <= store.swept) return;
    store.swept = until;
    parallel_for(Store::kParts, [&](size_t p) {
        const PartLocks locks(store, p, p + 1);
        Part& part = store.part(p);
        part.for_each([&](uint32_t slot) {
            if (store.expired(part.header(slot), until)) part.erase(slot);
        });
    });
}

inline bool is_admitted(Store& store, int64_t key, uint32_t now) {
    const StoreSettings& s = store.settings();
    if (s.admit_count != 0) return store.sketch().count(key) >= s.admit_count;
    if (s.admit_probability == 0) return true;
    const uint64_t draw = mix(mix(static_cast<uint64_t>(key) ^ ~s.init.salt) + kGolden * (uint64_t{now} + 1));
    return static_cast<double>(draw >> 11) * 0x1p-53 < s.admit_probability;
}

// Which of a request's keys without a row get one; there is room for them. The caller holds admission_mutex until they
// are in, so that no other thread is promised the same room.
inline std::vector<size_t> admit(const Request& r, uint32_t now) {
    Store& store = *r.store;
    forget_expired(store, now);
    std::vector<size_t> wanted;
    for (size_t i = 0; i < r.n; ++i)
        if (r.slots[i] == kNoSlot && is_admitted(store, r.keys[i], now)) wanted.push_back(i);
    if (store.settings().capacity != 0 && !wanted.empty()) {
        const uint64_t draw = hash_key(r.keys[wanted[0]]) + kGolden * (uint64_t{now} + 1);
        wanted.resize(std::min(wanted.size(), make_room(store, wanted.size(), now, draw)));
    }
    return wanted;
}

}  // namespace hotrow
