// A cache's rows: copies of rows that live elsewhere, read and updated here until a bound, an eviction or a flush.
//
// The copies of a table are a `Store` of their own, so that a copy is found, read, summed into and updated by the same
// code as any row, and its clock there is HET's current clock. Beside each copy stand (`Side`) HET's start clock, the
// clock it was taken over at, what is known of the server's clock, how many batches in flight hold it, and row and state
// as the server has them as far as it was told (`base`): what is written back is the difference. A cache that is the only
// one writes back rows as they are and needs no base.
//
// One thread at a time plans and absorbs an exchange; others read, update and release meanwhile. Whoever looks at a copy
// or its side holds the lock of the copy's part, in the copies' store. A copy that a batch holds is never evicted.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "batch.hpp"
#include "exchange.hpp"

namespace hotrow {

// Who is evicted first: the least recently used, the least often used, or the least recently used of those that are not
// popular yet, whereas popular ones stay while there are others.
enum class Keep : int { lru = 0, lfu = 1, pinned = 2 };

struct CacheSettings {
    size_t capacity = 0;    // rows, or bytes
    bool in_bytes = false;
    Keep keep = Keep::lfu;
    uint32_t popular = 0;   // uses that make a row popular
    uint32_t bound = 0;     // HET's s, kUnbounded for none
    double drift = 0;       // of a row's clock: what is written back at the latest; 0: only the bound counts
    uint32_t margin = 0;    // clocks by which the server's clock may move between an exchange and the read it is for
    bool sole = false;
    uint32_t sample = 0;    // of so many rows one is checked at every use, and its staleness counted; 0: none
    uint32_t shards = 1;
    uint64_t client = 0;

    // How many updates a copy may have before they are written back, taken over at clock `start`: fewer of a young row.
    uint64_t write_bound(uint32_t start) const {
        return drift == 0 ? bound : std::min<uint64_t>(bound, static_cast<uint64_t>(drift * start));
    }
    // How far the server's clock may be ahead of a copy's when a batch is planned.
    uint32_t read_bound() const { return bound == kUnbounded ? bound : bound - std::min(bound, margin); }
};

struct CacheCounts {
    static constexpr size_t kBehind = 1024;  // the last place counts everything from here on

    std::atomic<uint64_t> hits{0}, valid{0}, invalid{0}, misses{0}, evictions{0}, checked{0};
    std::atomic<uint64_t> written_rows{0}, fetched_rows{0}, fresh_rows{0}, dropped{0};
    std::atomic<uint64_t> exchanges{0}, sent_bytes{0}, received_bytes{0};
    std::array<std::atomic<uint64_t>, kBehind> behind{};  // of the rows sampled: clocks behind the server's at the read
    std::atomic<uint32_t> most_behind{0};

    void count_behind(uint32_t clocks) {
        ++behind[std::min<size_t>(clocks, kBehind - 1)];
        for (uint32_t most = most_behind; clocks > most && !most_behind.compare_exchange_weak(most, clocks);) {}
    }
};

struct Side {
    uint32_t start;       // the copy's clock less the updates that are still to be written back
    uint32_t taken;       // clock of the server's row that the copy stems from, with what was written back since
    uint32_t known;       // the server's clock as far as it was told
    uint32_t held;        // batches in flight that use the row
    uint32_t generation;  // counts the rows that had this slot
    uint32_t doubt;       // the cache's own number when the copy was last known to be good
};

// How often keys were used before they were evicted: one place for keys of one hash, the later one wins.
class Ghosts {
public:
    void open(size_t rows) {
        size_t places = 1024;
        while (places < 2 * rows && places < (size_t{1} << 22)) places *= 2;
        places_.assign(places, 0);
    }
    bool is_open() const { return !places_.empty(); }
    size_t bytes() const { return places_.size() * 8; }

    void remember(uint64_t hash, uint32_t uses) {
        if (is_open()) place(hash).store((hash & ~kUses) | std::min(uses, kMostUses), std::memory_order_relaxed);
    }
    uint32_t uses(uint64_t hash) {
        if (!is_open()) return 0;
        const uint64_t found = place(hash).load(std::memory_order_relaxed);
        return (found & ~kUses) == (hash & ~kUses) ? static_cast<uint32_t>(found & kUses) : 0;
    }

private:
    static constexpr uint64_t kUses = kMostUses;
    std::atomic_ref<uint64_t> place(uint64_t hash) { return std::atomic_ref(places_[mix(hash) % places_.size()]); }

    std::vector<uint64_t> places_;
};

// The copies of one table.
class Copies {
public:
    Copies(Store& rows_of, bool evicts, const CacheSettings& settings)
        : store(rows_of), always_check(evicts), sole_(settings.sole), shape_(rows_of.shape()) {
        const size_t floats = sole_ ? 0 : shape_.dim + shape_.state_dim;
        sides_.open(sizeof(Side) + floats * 4);
        row_bytes = shape_.stride() + sides_.stride() + 8;
    }

    Store& store;
    const bool always_check;  // the server's table evicts by use, so it must hear of every use
    size_t row_bytes;
    std::atomic<size_t> rows{0};
    bool joined = false;  // whether the copies' count of steps is that of the workers who were there before
    Ghosts ghosts;

    Side& side(uint32_t slot) const { return *reinterpret_cast<Side*>(sides_.at(slot)); }

    // A row as the server gave it: values as they are stored, state, clock. Scratch has room for dim floats.
    struct Given {
        const std::byte* values;
        const float* state;
        uint32_t clock;
    };

    uint32_t insert(Part& part, int64_t key, uint64_t hash, const Given& row, uint32_t step) {
        const uint32_t slot = part.insert(key, hash, [&](uint32_t made) {
            while (sides_.size() <= made) sides_.new_chunk(0);
            write(part, made, row);
            Header& h = part.header(made);
            h.clock = row.clock;
            h.last = step;
            h.uses = std::min(ghosts.uses(hash) + 1, kMostUses);
        });
        Side& s = side(slot);
        s = {row.clock, row.clock, row.clock, 1, s.generation + 1, 0};
        keep_base(part, slot);
        ++rows;
        return slot;
    }

    void erase(Part& part, uint32_t slot, uint64_t hash) {
        ghosts.remember(hash, part.header(slot).uses);
        ++side(slot).generation;
        side(slot).held = 0;
        part.erase(slot);
        --rows;
    }

    // What is to be written back. From here on the copy counts as written, and has the clock that the server's row gets if
    // nobody came before.
    void capture(Part& part, uint32_t slot, uint32_t* clocks, std::byte* values, float* state, float* scratch) {
        Header& h = part.header(slot);
        Side& s = side(slot);
        clocks[0] = s.taken;
        clocks[1] = h.clock;
        h.clock = clock_after(s.taken, h.clock);
        s.start = s.taken = h.clock;
        s.known = std::max(s.known, h.clock);
        if (sole_) {
            std::memcpy(values, part.values(slot), shape_.value_bytes());
            std::copy_n(part.state(slot), shape_.state_dim, state);
            return;
        }
        // The copy becomes what the server gets if nobody came before: base + change, which may round.
        auto* change = reinterpret_cast<float*>(values);
        take_change(part, slot, change, state, scratch);
        write_base(part, slot);
        add_change(shape_, part.values(slot), part.state(slot), change, state, h.key, h.clock, scratch);
        keep_base(part, slot);
    }

    // The server's row under the copy's own changes since it was captured; the only cache of all knows better. The clock is
    // the larger one, as if they had been written back: added up, clocks of workers that take over from each other would
    // run ahead of the updates there were, and past the bound.
    void rebase(Part& part, uint32_t slot, const Given& row, std::vector<float>& scratch) {
        Header& h = part.header(slot);
        Side& s = side(slot);
        const uint32_t own = h.clock - s.start;
        if (own == 0) {
            write(part, slot, row);
            h.clock = row.clock;
        } else {
            float *change = scratch.data(), *state = change + shape_.dim, *rest = state + shape_.state_dim;
            take_change(part, slot, change, state, rest);
            write(part, slot, row);
            keep_base(part, slot);
            h.clock = std::max(row.clock, h.clock);
            add_change(shape_, part.values(slot), part.state(slot), change, state, h.key, h.clock, rest);
        }
        if (own == 0) keep_base(part, slot);
        s.start = h.clock - own;
        s.taken = s.known = row.clock;
    }

    // The server has made the same update: the copy is as its row again.
    void settle(Part& part, uint32_t slot) {
        side(slot).start = side(slot).taken = side(slot).known = part.header(slot).clock;
        keep_base(part, slot);
    }

    // The row starts anew: the server evicted it, and own changes are forgotten with it.
    void reset(Part& part, uint32_t slot, const Given& row) {
        write(part, slot, row);
        keep_base(part, slot);
        part.header(slot).clock = side(slot).start = side(slot).taken = side(slot).known = row.clock;
    }

    size_t scratch_floats() const { return 2 * shape_.dim + shape_.state_dim; }
    bool is_dirty(const Part& part, uint32_t slot) const { return part.header(slot).clock != side(slot).start; }

private:
    float* base(uint32_t slot) const { return reinterpret_cast<float*>(sides_.at(slot) + sizeof(Side)); }

    void write(Part& part, uint32_t slot, const Given& row) const {
        std::memcpy(part.values(slot), row.values, shape_.value_bytes());
        std::copy_n(row.state, shape_.state_dim, part.state(slot));
    }

    void keep_base(const Part& part, uint32_t slot) const {
        if (sole_) return;
        store.read_values(part, slot, base(slot), shape_.dim);
        std::copy_n(part.state(slot), shape_.state_dim, base(slot) + shape_.dim);
    }

    void write_base(Part& part, uint32_t slot) const {
        if (shape_.bf16)
            round_nearest(base(slot), reinterpret_cast<uint16_t*>(part.values(slot)), shape_.dim);
        else
            std::memcpy(part.values(slot), base(slot), shape_.dim * 4);
        std::copy_n(base(slot) + shape_.dim, shape_.state_dim, part.state(slot));
    }

    // Scratch has room for dim floats.
    void take_change(const Part& part, uint32_t slot, float* values, float* state, float* scratch) const {
        store.read_values(part, slot, scratch, shape_.dim);
        const float* b = base(slot);
        for (size_t j = 0; j < shape_.dim; ++j) values[j] = scratch[j] - b[j];
        for (size_t j = 0; j < shape_.state_dim; ++j) state[j] = part.state(slot)[j] - b[shape_.dim + j];
    }

    const bool sole_;
    const Shape shape_;
    Records sides_;
};

// The copies of all tables, which share one capacity, and who of them goes next.
class Cache {
public:
    Cache(const std::vector<Store*>& stores, const std::vector<bool>& evicts, const CacheSettings& given) : settings(given) {
        for (size_t t = 0; t < stores.size(); ++t) tables.push_back(std::make_unique<Copies>(*stores[t], evicts[t], settings));
        epochs.assign(settings.shards, 0);
        positions.assign(settings.shards, 0);
        size_t least = SIZE_MAX;
        for (auto& t : tables) least = std::min(least, t->row_bytes);
        const size_t rows = settings.in_bytes ? settings.capacity / least : settings.capacity;
        victims_at_once_ = rows / 16;
        if (settings.keep == Keep::lru) return;
        for (auto& t : tables) t->ghosts.open(rows / std::max<size_t>(1, tables.size() / 2));
    }

    const CacheSettings settings;
    std::vector<std::unique_ptr<Copies>> tables;
    CacheCounts counts;
    uint32_t doubt = 1;  // raised when it is not known any more which copies are good
    std::vector<uint64_t> epochs, positions;  // of the ledgers, shard by shard

    size_t cost(size_t t) const { return settings.in_bytes ? tables[t]->row_bytes : 1; }
    size_t used() const {
        size_t total = 0;
        for (size_t t = 0; t < tables.size(); ++t) total += tables[t]->rows * cost(t);
        return total;
    }

    struct Victim {
        uint64_t worth;
        int64_t key;
        uint32_t table, slot, generation, last;
        bool operator<(const Victim& o) const { return worth != o.worth ? worth < o.worth : key < o.key; }
    };

    // Rows to evict so that `wanted` more of the capacity is free, as far as there are any that no batch holds. Those
    // that are as the server has them are gone at once; the others are the caller's to write back and erase.
    std::vector<Victim> evict(size_t wanted) {
        std::vector<Victim> out;
        const size_t total = used() + wanted;
        size_t excess = total > settings.capacity ? total - settings.capacity : 0;
        for (bool refilled = false; excess > 0;) {
            if (next_ == queue_.size()) {
                if (refilled || !refill(excess)) break;
                refilled = true;
            }
            const Victim v = queue_[next_++];
            Copies& copies = *tables[v.table];
            const uint64_t hash = hash_key(v.key);
            const size_t p = Store::part_of(hash);
            const PartLocks lock(copies.store, p, p + 1);
            Part& part = copies.store.part(p);
            Side& side = copies.side(v.slot);
            if (side.generation != v.generation || side.held != 0 || part.header(v.slot).last != v.last) continue;
            refilled = false;
            excess -= std::min(excess, cost(v.table));
            ++counts.evictions;
            if (copies.is_dirty(part, v.slot)) {
                side.held = 1;  // by its eviction
                out.push_back(v);
            } else {
                copies.erase(part, v.slot, hash);
            }
        }
        return out;
    }

    void forget_queue() { queue_.clear(), next_ = 0; }

private:
    // The rows of least worth, in order, for the next evictions: reading every row pays only for many of them.
    bool refill(size_t excess) {
        forget_queue();
        size_t least = SIZE_MAX;
        for (size_t t = 0; t < tables.size(); ++t) {
            Copies& copies = *tables[t];
            least = std::min(least, cost(t));
            for (size_t p = 0; p < Store::kParts; ++p) {
                const PartLocks lock(copies.store, p, p + 1);
                const Part& part = copies.store.part(p);
                part.for_each([&](uint32_t slot) {
                    const Side& side = copies.side(slot);
                    const Header& h = part.header(slot);
                    if (side.held == 0)
                        queue_.push_back({worth(h), h.key, static_cast<uint32_t>(t), slot, side.generation, h.last});
                });
            }
        }
        const size_t most = std::min(queue_.size(), std::max(excess / least + 1, victims_at_once_));
        std::nth_element(queue_.begin(), queue_.begin() + static_cast<ptrdiff_t>(most), queue_.end());
        queue_.resize(most);
        std::sort(queue_.begin(), queue_.end());
        return !queue_.empty();
    }

    uint64_t worth(const Header& h) const {
        switch (settings.keep) {
            case Keep::lru: return h.last;
            case Keep::lfu: return uint64_t{h.uses} << 32 | h.last;
            default: return h.uses >= settings.popular ? uint64_t{h.uses} << 32 | h.last : h.last;
        }
    }

    std::vector<Victim> queue_;
    size_t next_ = 0, victims_at_once_ = 1024;
};

}  // namespace hotrow
