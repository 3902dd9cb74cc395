// A table's rows: parts by hash, and the batch calls over several tables at once.
//
// Every batch call cuts its keys into pieces, each a range of one table's parts, and runs the pieces on all cores. A
// piece locks its parts in ascending order and holds no other lock, so calls from several threads never race on
// a row and never wait in a circle. Inside a piece keys go through in blocks: first all buckets are prefetched,
// then all records, then the work is done on what has arrived.
//
// Within one part the keys of a call are visited in their given order, so results do not depend on the threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "part.hpp"
#include "pooling.hpp"
#include "sketch.hpp"
#include "threads.hpp"

namespace hotrow {

struct StoreSettings {
    Shape shape;
    Optimizer optimizer;
    Init init;
    uint32_t admit_count = 0;      // 0: off
    double admit_probability = 0;  // 0: off
    size_t sketch_bytes = 0;
    size_t capacity = 0;  // 0: no bound
    bool lfu = false;
    uint32_t ttl = 0;  // 0: rows live for ever
};

class Store;

constexpr uint32_t kInsert = kNoSlot - 1;  // in a fetch: this key is to get a row
constexpr uint32_t kFirstSpecialSlot = kInsert;

// One table's share of a batch call. rows[position] belongs to keys[i], position being positions[i], or i without them.
struct Request {
    Store* store = nullptr;
    const int64_t* keys = nullptr;
    const int64_t* positions = nullptr;
    size_t n = 0;
    float* rows = nullptr;
    uint32_t* slots = nullptr;  // where each key's row was found; the calls use it as a guess and write it back
    float lr = 0;               // for updates

    // For updates: where gradients are summed from, instead of standing in `rows`.
    const Grouping* grouping = nullptr;
    const Addresses* addresses = nullptr;
    size_t table = 0;  // in the grouping

    Step step = {};                  // for updates
    std::vector<uint32_t> order = {};   // the keys' numbers sorted by part, where several threads share the request
    std::vector<uint32_t> bounds = {};  // where in `order` each part begins

    size_t position(size_t i) const { return positions == nullptr ? i : static_cast<size_t>(positions[i]); }
    float* row(size_t i, size_t dim) const { return rows + position(i) * dim; }

    // The gradient of keys[i]'s row; scratch has room for it.
    const float* gradient(size_t i, size_t dim, float* scratch) const {
        if (addresses == nullptr) return row(i, dim);
        return grouping->sum_gradient(*addresses, table, position(i), scratch, dim);
    }
};

// Rows as columns: what snapshots read and write.
struct Columns {
    std::vector<int64_t> keys;
    std::vector<std::byte> values;
    std::vector<float> state;
    std::vector<uint32_t> clocks, uses, last;
};

// A lock of four bytes, so that those of a table's parts share a cache line or two: taking them all costs little.
class Lock {
public:
    void lock() {
        while (taken_.exchange(1, std::memory_order_acquire) != 0) taken_.wait(1, std::memory_order_relaxed);
    }
    void unlock() {
        taken_.store(0, std::memory_order_release);
        taken_.notify_one();
    }

private:
    std::atomic<uint32_t> taken_{0};
};

// Holds the locks of a range of a table's parts, taken in ascending order.
class PartLocks {
public:
    PartLocks(const Store& store, size_t first, size_t last);
    explicit PartLocks(const Store& store);
    ~PartLocks();
    PartLocks(const PartLocks&) = delete;
    PartLocks& operator=(const PartLocks&) = delete;

private:
    const Store& store_;
    size_t first_, last_;
};

class Store {
public:
    static constexpr size_t kParts = 16;

    explicit Store(const StoreSettings& settings)
        : settings_(settings), parts_(new Part[kParts]), sketch_(settings.sketch_bytes) {
        records_.open(settings_.shape.stride());
        for (size_t p = 0; p < kParts; ++p) parts_[p].open(settings_.shape, records_);
    }

    const StoreSettings& settings() const { return settings_; }
    const Shape& shape() const { return settings_.shape; }

    size_t rows() const { return sum([](const Part& p) { return p.rows(); }); }
    size_t bytes() const { return sum([](const Part& p) { return p.bytes(); }) + sketch_.counters().size(); }

    std::atomic<uint64_t> steps{0};  // updates applied: what Adam corrects its bias by

    static size_t part_of(uint64_t hash) { return (hash >> 8) % kParts; }
    Part& part(size_t p) const { return parts_[p]; }
    Lock& lock(size_t p) const { return locks_[p]; }

    // Whether a key without a row gets one on the spot, with no count to look at and no room to make.
    bool inserts_at_once() const {
        return settings_.admit_count == 0 && settings_.admit_probability == 0 && settings_.capacity == 0 &&
               settings_.ttl == 0;
    }

    bool expired(const Header& h, uint32_t now) const {
        return settings_.ttl != 0 && uint64_t{h.last} + settings_.ttl < now;
    }

    void initial_values(int64_t key, float* out) const {
        const Shape& s = shape();
        settings_.init.row(key, out, s.dim);
        if (s.bf16)
            for (size_t j = 0; j < s.dim; ++j) out[j] = from_bf16(nearest_bf16(out[j]));
    }

    // `dim` is the shape's, here and below: given, so that it may be a constant.
    void read_values(const Part& part, uint32_t slot, float* out, size_t dim) const {
        if (shape().bf16)
            widen(reinterpret_cast<const uint16_t*>(part.values(slot)), out, dim);
        else
            copy_floats(out, reinterpret_cast<const float*>(part.values(slot)), dim);
    }

    uint32_t insert(Part& part, int64_t key, uint64_t hash, float* values) const {
        const uint32_t slot = part.insert(key, hash);
        initial_values(key, values);
        if (shape().bf16)
            round_nearest(values, reinterpret_cast<uint16_t*>(part.values(slot)), shape().dim);
        else
            std::memcpy(part.values(slot), values, shape().dim * 4);
        std::fill_n(part.state(slot), shape().state_dim, settings_.optimizer.initial_state());
        return slot;
    }

    // scratch has room for 2 dim floats.
    void update(Part& part, uint32_t slot, const Step& step, const float* grad, float* scratch, size_t dim) const {
        part.touch(slot);
        Header& h = part.header(slot);
        const bool first = h.clock == 0;
        ++h.clock;
        if (!shape().bf16) {
            auto* row = reinterpret_cast<float*>(part.values(slot));
            update_row(settings_.optimizer, step, row, part.state(slot), grad, scratch, dim, first);
            return;
        }
        auto* stored = reinterpret_cast<uint16_t*>(part.values(slot));
        float* row = scratch + dim;
        widen(stored, row, dim);
        update_row(settings_.optimizer, step, row, part.state(slot), grad, scratch, dim, first);
        round_stochastic(row, stored, dim, h.key, h.clock);
    }

    // Decides which of the keys without a row get one (their slot becomes kInsert) and makes room for them.
    // The caller holds admission_mutex until they are in, so that no other thread is promised the same room.
    void admit(Request& r, uint32_t now) {
        if (settings_.ttl != 0 && now >= swept_ + settings_.ttl / 4 + 1) forget_expired(now);
        std::vector<size_t> wanted;
        for (size_t i = 0; i < r.n; ++i)
            if (r.slots[i] == kNoSlot && is_admitted(r.keys[i], now)) wanted.push_back(i);
        if (settings_.capacity != 0) wanted.resize(std::min(wanted.size(), make_room(wanted.size(), now)));
        for (size_t i : wanted) r.slots[i] = kInsert;
    }

    std::mutex admission_mutex;

    // Erases the least valuable rows until at most `target` are left, but none that was used at step `now` or later.
    void evict_to(size_t target, uint32_t now) {
        const PartLocks locks(*this);
        struct Row {
            uint64_t worth;
            int64_t key;
            bool operator<(const Row& o) const { return worth != o.worth ? worth < o.worth : key < o.key; }
        };
        std::vector<Row> rows;
        size_t count = 0;
        for (size_t p = 0; p < kParts; ++p) {
            count += parts_[p].rows();
            parts_[p].for_each([&](uint32_t slot) {
                const Header& h = parts_[p].header(slot);
                const uint64_t worth = settings_.lfu ? uint64_t{h.uses} << 32 | h.last : h.last;
                if (h.last < now) rows.push_back({worth, h.key});
            });
        }
        const size_t victims = std::min(count > target ? count - target : 0, rows.size());
        std::nth_element(rows.begin(), rows.begin() + static_cast<ptrdiff_t>(victims), rows.end());
        for (size_t i = 0; i < victims; ++i) erase_locked(rows[i].key);
    }

    bool erase_locked(int64_t key) {
        const uint64_t hash = hash_key(key);
        Part& part = parts_[part_of(hash)];
        const uint32_t slot = part.find(key, hash);
        if (slot != kNoSlot) part.erase(slot);
        return slot != kNoSlot;
    }

    // The rows of those of these keys that have one, in their order; with `erase` they are gone afterwards.
    Columns rows_of(const int64_t* keys, size_t n, bool erase) {
        constexpr size_t kAhead = 16;
        const PartLocks locks(*this);
        Columns out;
        for (size_t i = 0; i < n; ++i) {
            if (i + kAhead < n) {
                const uint64_t next = hash_key(keys[i + kAhead]);
                parts_[part_of(next)].prefetch_bucket(next);
            }
            const uint64_t hash = hash_key(keys[i]);
            Part& part = parts_[part_of(hash)];
            const uint32_t slot = part.find(keys[i], hash);
            if (slot == kNoSlot) continue;
            append(out, reinterpret_cast<const std::byte*>(&part.header(slot)));
            if (erase) part.erase(slot);
        }
        return out;
    }

    // ---- snapshots: begin at a moment, then read chunk after chunk while others go on, then end ----

    void begin_snapshot(Cut cut) {
        std::lock_guard admission(admission_mutex);
        const PartLocks locks(*this);
        if (snapshot_) throw std::logic_error("a snapshot of this table is already under way");
        cut_steps = steps.load();
        cut_sketch = sketch_.counters();
        cut_erased.clear();
        snapshot_ = true;
        snapshot_part_ = 0;
        for (size_t p = 0; p < kParts; ++p) parts_[p].begin_snapshot(cut);
        if (cut != Cut::changed) return;
        for (size_t p = 0; p < kParts; ++p)
            cut_erased.insert(cut_erased.end(), parts_[p].cut_erased().begin(), parts_[p].cut_erased().end());
    }

    // About `most` rows of the cut; empty when there are no more.
    Columns read_snapshot(size_t most) {
        Columns out;
        if (!snapshot_) throw std::logic_error("no snapshot of this table is under way");
        while (snapshot_part_ < kParts && out.keys.size() < most) {
            const PartLocks locks(*this, snapshot_part_, snapshot_part_ + 1);
            const size_t want = std::min<size_t>(most - out.keys.size(), 4096);
            if (!parts_[snapshot_part_].visit_snapshot(want, [&](const std::byte* r) { append(out, r); }))
                ++snapshot_part_;
        }
        return out;
    }

    void end_snapshot(bool kept) {
        const PartLocks locks(*this);
        if (!snapshot_) throw std::logic_error("no snapshot of this table is under way");
        for (size_t p = 0; p < kParts; ++p) parts_[p].end_snapshot(kept);
        snapshot_ = false;
        cut_sketch = {};
        cut_erased = {};
    }

    bool tracks_erased() const {
        const PartLocks locks(*this);
        bool all = true;
        for (size_t p = 0; p < kParts; ++p) all &= parts_[p].tracks_erased();
        return all;
    }

    void settle() {
        const PartLocks locks(*this);
        for (size_t p = 0; p < kParts; ++p) parts_[p].settle();
    }

    void set_sketch(const uint8_t* counters, size_t n) {
        std::lock_guard lock(admission_mutex);
        if (n != sketch_.counters().size()) throw std::invalid_argument("the sketch has another size");
        sketch_.counters().assign(counters, counters + n);
    }

    uint64_t cut_steps = 0;
    std::vector<uint8_t> cut_sketch;
    std::vector<int64_t> cut_erased;

private:
    template <class Of>
    size_t sum(Of of) const {
        size_t total = 0;
        for (size_t p = 0; p < kParts; ++p) {
            const PartLocks locks(*this, p, p + 1);
            total += of(parts_[p]);
        }
        return total;
    }

    bool is_admitted(int64_t key, uint32_t now) {
        if (settings_.admit_count != 0) return sketch_.count(key) >= settings_.admit_count;
        if (settings_.admit_probability == 0) return true;
        const uint64_t draw = mix(mix(static_cast<uint64_t>(key) ^ ~settings_.init.salt) + kGolden * (uint64_t{now} + 1));
        return static_cast<double>(draw >> 11) * 0x1p-53 < settings_.admit_probability;
    }

    // Room for up to `wanted` new rows, of which the number granted is returned. Evicting reads every row, so it
    // makes room for a while: a 32nd of the capacity at a time.
    size_t make_room(size_t wanted, uint32_t now) {
        // Expired rows go first, whenever they were last swept: what is evicted depends on the others alone, so that a
        // resumed run evicts the same.
        if (settings_.ttl != 0 && rows() + wanted > settings_.capacity) forget_expired(now);
        if (rows() + wanted > settings_.capacity) {
            const size_t spare = std::max(wanted, settings_.capacity / 32);
            evict_to(settings_.capacity - std::min(spare, settings_.capacity), now);
        }
        const size_t left = rows();
        return left < settings_.capacity ? settings_.capacity - left : 0;
    }

    // A row past its time already reads as absent; this frees its memory, and reads every row to do so.
    void forget_expired(uint32_t now) {
        swept_ = now;
        parallel_for(kParts, [&](size_t p) {
            const PartLocks locks(*this, p, p + 1);
            parts_[p].for_each([&](uint32_t slot) {
                if (expired(parts_[p].header(slot), now)) parts_[p].erase(slot);
            });
        });
    }

    void append(Columns& out, const std::byte* record) const {
        const auto* h = reinterpret_cast<const Header*>(record);
        const std::byte* state = record + sizeof(Header);
        const std::byte* values = state + shape().state_bytes();
        out.keys.push_back(h->key);
        out.clocks.push_back(h->clock);
        out.uses.push_back(h->uses);
        out.last.push_back(h->last);
        out.values.insert(out.values.end(), values, values + shape().value_bytes());
        const auto* floats = reinterpret_cast<const float*>(state);
        out.state.insert(out.state.end(), floats, floats + shape().state_dim);
    }

    StoreSettings settings_;
    Records records_;
    mutable Lock locks_[kParts];
    std::unique_ptr<Part[]> parts_;
    Sketch sketch_;
    uint64_t swept_ = 0;
    bool snapshot_ = false;
    size_t snapshot_part_ = 0;
};

inline PartLocks::PartLocks(const Store& store, size_t first, size_t last) : store_(store), first_(first), last_(last) {
    for (size_t p = first_; p < last_; ++p) store_.lock(p).lock();
}
inline PartLocks::PartLocks(const Store& store) : PartLocks(store, 0, Store::kParts) {}
inline PartLocks::~PartLocks() {
    for (size_t p = first_; p < last_; ++p) store_.lock(p).unlock();
}

}  // namespace hotrow
