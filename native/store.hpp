// A table's rows: parts by hash, and the batch calls over several tables at once.
//
// Every batch call cuts its keys into pieces, each a range of one table's parts, and runs the pieces on all cores. A
// piece locks its parts in ascending order and holds no other lock, so calls from several threads never race on
// a row and never wait in a circle. Inside a piece keys go through in blocks: first all buckets are prefetched,
// then all records, then the work is done on what has arrived.
//
// What happens to a row depends on its own key and gradients alone, and a key given twice is visited in that order: results
// do not depend on the threads. Where in memory a new row lies may.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "durable.hpp"
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

// Where a durable table keeps its rows. `fresh`: it begins empty, whatever was there.
struct Folder {
    std::string path;      // empty: the table is in plain memory
    std::string settings;  // what is kept beside the rows about them
    bool fresh = false;
};

class Store;

// One table's share of a batch call. rows[position] belongs to keys[i], position being positions[i], or i without them.
struct Request {
    Store* store = nullptr;
    const int64_t* keys = nullptr;
    const int64_t* positions = nullptr;
    size_t n = 0;
    float* rows = nullptr;
    uint32_t* slots = nullptr;  // where each key's row was found; the calls use it as a guess and write it back
    float lr = 0;               // for updates
    Push push = {};             // for updates

    // For updates: where gradients are summed from, instead of standing in `rows`. For rows that are brought: the results
    // they are pooled into, instead of going there; the keys are then all of the grouping's table.
    const Grouping* grouping = nullptr;
    const Addresses* addresses = nullptr;
    const std::vector<Matrix>* results = nullptr;
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
    static constexpr size_t kParts = Durable::kParts;
    static_assert(kParts == Shelf::kParts);

    explicit Store(const StoreSettings& settings, const Folder& folder = {})
        : settings_(folder.path.empty() ? settings : with_sums(settings)),
          durable_(folder.path.empty() ? nullptr
                                       : new Durable(folder.path, folder.fresh, folder.settings, settings_.shape.stride(),
                                                     settings.sketch_bytes / 2 * 2)),
          parts_(new Part[kParts]),
          sketch_(durable_ == nullptr ? nullptr : new Sketch(durable_->sketch())) {
        if (sketch_ == nullptr) sketch_ = std::make_unique<Sketch>(settings.sketch_bytes);
        for (size_t p = 0; p < kParts; ++p) parts_[p].open(settings_.shape, records_, shelf_, p, durable_.get());
        if (durable_ == nullptr)
            records_.open(settings_.shape.stride());
        else
            recover();
    }

    Store(const Store&) = delete;
    ~Store() {
        if (durable_ != nullptr && durable_->is_mine()) parallel_for(kParts, [&](size_t p) { parts_[p].sum_up(); });
    }

    const StoreSettings& settings() const { return settings_; }
    Durable* durable() const { return durable_.get(); }
    uint64_t life() const { return durable_ == nullptr ? 0 : durable_->life(); }
    size_t undone() const { return undone_; }  // rows that were being changed when an earlier process was killed
    const Shape& shape() const { return settings_.shape; }

    size_t rows() const { return sum([](const Part& p) { return p.rows(); }); }
    size_t rows_at_once() const;  // the sum above, while others evict and insert, may see the one and not the other
    size_t bytes() const { return sum([](const Part& p) { return p.bytes(); }) + sketch_->counters().size(); }

    // Updates applied: what Adam corrects its bias by.
    uint64_t steps() const { return durable_ == nullptr ? steps_.load() : durable_->steps(); }
    void set_steps(uint64_t steps) {
        if (durable_ == nullptr)
            steps_ = steps;
        else
            durable_->set_steps(steps);
    }
    void raise_steps(uint64_t least) {
        if (durable_ != nullptr) return durable_->raise_steps(least);
        for (uint64_t now = steps_; now < least && !steps_.compare_exchange_weak(now, least);) {
        }
    }
    // To be called before each change of rows by gradients: counts it, and a durable table learns of the push.
    uint64_t next_step(const Push& push, size_t keys) {
        return durable_ == nullptr ? ++steps_ : durable_->next_step(push, keys, true);
    }
    // The same for changes that count as no step.
    void begin_push(const Push& push, size_t keys) {
        if (durable_ != nullptr) durable_->next_step(push, keys, false);
    }

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

    // A new row for a key that has none, used at step `now`; its values are given as well.
    uint32_t insert(Part& part, int64_t key, uint64_t hash, float* values, uint32_t now) const {
        return part.insert(key, hash, [&](uint32_t slot) {
            initial_values(key, values);
            if (shape().bf16)
                round_nearest(values, reinterpret_cast<uint16_t*>(part.values(slot)), shape().dim);
            else
                std::memcpy(part.values(slot), values, shape().dim * 4);
            std::fill_n(part.state(slot), shape().state_dim, settings_.optimizer.initial_state());
            part.header(slot).last = now;
            part.header(slot).uses = 1;
        });
    }

    // scratch has room for 2 dim floats.
    [[gnu::always_inline]] void update(Part& part, uint32_t slot, const Step& step, const float* grad, float* scratch, size_t dim) const {
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

    Sketch& sketch() const { return *sketch_; }
    std::mutex admission_mutex;  // held from the decision who gets a row until they are in (admission.hpp)
    uint32_t swept = 0;          // step up to which expired rows were erased; guarded by it too

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
        cut_steps = steps();
        cut_sketch.assign(sketch_->counters().begin(), sketch_->counters().end());
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
        if (n != sketch_->counters().size()) throw std::invalid_argument("the sketch has another size");
        std::copy_n(counters, n, sketch_->counters().begin());
    }

    uint64_t cut_steps = 0;
    std::vector<uint8_t> cut_sketch;
    std::vector<int64_t> cut_erased;

private:
    // What an earlier process left in the folder, made whole.
    void recover() {
        records_.open(shape().stride(), durable_->records_prefix(), durable_->chunks(),
                      [this](uint64_t chunks) { durable_->set_chunks(chunks); });
        auto chunks = records_.find_chunks(kParts);
        undone_ = durable_->undo(records_.size(), [&](uint32_t slot) { return records_.at(slot); });
        parallel_for(kParts, [&](size_t p) {
            parts_[p].recover(std::move(chunks[p]), [p](uint64_t hash) { return part_of(hash) == p; });
        });
        durable_->begin();
    }

    static StoreSettings with_sums(StoreSettings settings) {
        settings.shape.head = kSum + 4;
        return settings;
    }

    template <class Of>
    size_t sum(Of of) const {
        size_t total = 0;
        for (size_t p = 0; p < kParts; ++p) {
            const PartLocks locks(*this, p, p + 1);
            total += of(parts_[p]);
        }
        return total;
    }

    void append(Columns& out, const std::byte* record) const {
        const auto* h = reinterpret_cast<const Header*>(record);
        const std::byte* state = record + shape().head;
        const std::byte* values = state + shape().state_bytes();
        out.keys.push_back(int64_t{h->key});  // no reference: it is not aligned
        out.clocks.push_back(h->clock);
        out.uses.push_back(h->uses);
        out.last.push_back(h->last);
        out.values.insert(out.values.end(), values, values + shape().value_bytes());
        const auto* floats = reinterpret_cast<const float*>(state);
        out.state.insert(out.state.end(), floats, floats + shape().state_dim);
    }

    StoreSettings settings_;
    std::unique_ptr<Durable> durable_;  // null: in plain memory
    Records records_;
    Shelf shelf_;
    mutable Lock locks_[kParts];
    std::unique_ptr<Part[]> parts_;
    std::unique_ptr<Sketch> sketch_;
    std::atomic<uint64_t> steps_{0};
    size_t undone_ = 0;
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

inline size_t Store::rows_at_once() const {
    const PartLocks locks(*this);
    size_t count = 0;
    for (size_t p = 0; p < kParts; ++p) count += parts_[p].rows();
    return count;
}

}  // namespace hotrow
