// One part of a table: the rows whose key hashes to it, their index, and what a snapshot under way needs.
// Whoever calls anything here holds the part's lock, which the table keeps. A table has many parts, so that threads
// seldom meet.
//
// A row is one record, so that finding, reading and updating it touch neighbouring lines:
//
//     key 8 | clock 4 | last used 4 | uses and flags 4 | with a folder: sum 4 | optimizer state | values
//
// A slot is a record's number in the table; it stays the row's until the row is erased, and belongs to one part for
// good. A record becomes live when all else of it is written, so that one found in a file is whole.
//
// With a folder each record has a sum, so that whoever opens the folder next finds what was altered. Whatever changes a record puts
// kStale in the sum's place first, which costs one store; sums are made when the table is closed, and of the rows that a snapshot
// comes by. So after a kill the rows that were changed or fetched since cannot be told from altered ones, but there are as many
// as there should be. Making the sum at every change would cost an update of a row 15 to 40 percent more.
//
// A snapshot is a cut in time: from `begin_snapshot` on, whoever changes a record that the snapshot has not visited
// first saves it aside. Each record has a bit for "visited", whose meaning flips with every snapshot, so that beginning
// one costs nothing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "checksum.hpp"
#include "durable.hpp"
#include "index.hpp"
#include "memory.hpp"
#include "optimizer.hpp"
#include "records.hpp"
#include "rows.hpp"

namespace hotrow {

#pragma pack(push, 4)
struct Header {
    int64_t key;
    uint32_t clock;  // updates so far
    uint32_t last;   // step of the last use
    uint32_t uses : 24, live : 1, dirty : 1, visited : 1, unused : 5;
};
#pragma pack(pop)
static_assert(sizeof(Header) == 20);
constexpr size_t kSum = sizeof(Header);  // where a record's sum is, in a folder
constexpr uint32_t kStale = 0xA55A5AA5;   // no sum: the record was changed since

// What a snapshot holds: every row, or those changed since the last one, each the base of the next; or every row with
// no effect on what the next one holds.
enum class Cut : int { full = 0, changed = 1, peek = 2 };

constexpr uint32_t kMostUses = (1u << 24) - 1;

// How the records of a table look.
struct Shape {
    size_t dim = 0, state_dim = 0;
    bool bf16 = false;
    size_t head = sizeof(Header);  // bytes before the state

    size_t value_bytes() const { return dim * (bf16 ? 2 : 4); }
    size_t state_bytes() const { return state_dim * 4; }
    // Long records begin at multiples of 32 bytes where that costs at most a sixteenth: they then touch a line less.
    size_t stride() const {
        const size_t bytes = (head + state_bytes() + value_bytes() + 3) / 4 * 4;
        const size_t padded = (bytes + 31) / 32 * 32;
        return (padded - bytes) * 16 <= bytes ? padded : bytes;
    }
};

class alignas(64) Part {
    // What every lookup needs stands first, on one cache line.
    Records* records_ = nullptr;  // the table's
    Index index_;
    Shape shape_;
    Notes* notes_ = nullptr;  // with a folder

public:

    void open(const Shape& shape, Records& records, Shelf& shelf, size_t number, Durable* durable) {
        shape_ = shape;
        records_ = &records;
        shelf_ = &shelf;
        number_ = number;
        if (durable == nullptr) return;
        notes_ = &durable->notes(number);
        salt_ = mix(durable->id() + kGolden * durable->life());
    }

    // Finds the rows again in the chunks an earlier process left; is_here(hash) says whether a key is of this part.
    // Every row counts as changed, and what was erased is not known: the next snapshot is a full one.
    template <class IsHere>
    void recover(std::vector<uint32_t>&& chunks, IsHere is_here) {
        chunks_ = std::move(chunks);
        used_ = chunks_.size() * Records::kChunk;
        for (size_t i = used_; i-- > 0;) {
            const uint32_t slot = slot_at(i);
            Header& h = header(slot);
            if (!is_whole(slot) || (h.live && !is_here(hash_key(h.key)))) records_->refuse(slot);
            if (!h.live) free_.push_back(slot);
            if (!h.dirty) h.dirty = 1;
            if (h.visited != visited_) h.visited = visited_;
        }
        const uint64_t unsure = notes_->moves != 0;  // one came or went as the process was killed
        if (rows() > notes_->rows + unsure || rows() + unsure < notes_->rows) records_->refuse(used_ == 0 ? 0 : slot_at(0));
        notes_->rows = rows();
        in_order();
        notes_->moves = 0;
        if (rows() > 0) rebuild(rows());
    }

    size_t rows() const { return used_ - free_.size(); }
    size_t bytes() const { return used_ * records_->stride() + index_.bytes() + (free_.capacity() + chunks_.capacity()) * 4 + erased_.capacity() * 8; }

    std::byte* record(uint32_t slot) const { return records_->at(slot); }
    Header& header(uint32_t slot) const { return *reinterpret_cast<Header*>(record(slot)); }
    float* state(uint32_t slot) const { return reinterpret_cast<float*>(record(slot) + shape_.head); }
    std::byte* values(uint32_t slot) const { return record(slot) + shape_.head + shape_.state_bytes(); }

    void prefetch_bucket(uint64_t hash) const {
        if (index_.buckets() != 0) index_.prefetch(hash);
    }
    uint32_t candidate(uint64_t hash) const { return index_.candidate(hash); }
    void prefetch_record(uint32_t slot) const {
        const auto from = reinterpret_cast<uintptr_t>(record(slot)), end = from + records_->stride();
        for (uintptr_t line = from & ~uintptr_t{63}; line < end; line += 64) ask_for(reinterpret_cast<const void*>(line));
    }

    bool holds(uint32_t slot, int64_t key) const {
        const Header& h = header(slot);
        return h.key == key && h.live;
    }

    uint32_t find(int64_t key, uint64_t hash) const {
        return index_.find(hash, [&](uint32_t slot) { return header(slot).key == key; });
    }

    // `guess` first: the slot an earlier call found, right unless the row was erased since.
    uint32_t find(int64_t key, uint64_t hash, uint32_t guess) const {
        return guess < records_->size() && holds(guess, key) ? guess : find(key, hash);
    }

    // A new record for a key that has none; fill(slot) writes its values and state, and what else is not zero.
    template <class Fill>
    uint32_t insert(int64_t key, uint64_t hash, Fill fill) {
        if (rows() + 1 > index_.capacity()) rebuild(rows() + 1);
        uint32_t slot;
        if (!free_.empty()) {
            slot = free_.back();
            free_.pop_back();
        } else {
            if (used_ % Records::kChunk == 0) chunks_.push_back(records_->new_chunk(number_));
            slot = slot_at(used_++);
        }
        index_.insert(hash, slot);
        begin_move(slot);
        header(slot) = Header{key, 0, 0, 0, 0, 1, visited_, 0};
        fill(slot);
        in_order();
        header(slot).live = 1;
        end_move();
        return slot;
    }

    void erase(uint32_t slot) {
        save_if_unvisited(slot);
        Header& h = header(slot);
        free_.push_back(slot);
        if (track_erased_) remember_erased(h.key);
        index_.erase(hash_key(h.key), slot);
        begin_move(slot);
        h.live = 0;
        end_move();
    }

    // Counts a use of the row at step `now`.
    void use(uint32_t slot, uint32_t now) {
        touch(slot);
        in_order();
        Header& h = header(slot);
        h.last = now;
        if (h.uses < kMostUses) h.uses = h.uses + 1;
    }

    // To be called before a record changes; afterwards it counts as changed since the last snapshot. With a folder no store of the
    // change may come before: a Trail sees to that, and `use`.
    void touch(uint32_t slot) {
        save_if_unvisited(slot);
        header(slot).dirty = 1;
        make_stale(slot);
    }

    // Makes the sums of all records that have none.
    void sum_up() {
        for (size_t i = 0; i < used_; ++i) sum_up(slot_at(i));
    }

    template <class Visit>
    void for_each(Visit visit) const {
        for (size_t i = 0; i < used_; ++i)
            if (header(slot_at(i)).live) visit(slot_at(i));
    }

    // As for_each, for rows whose key's hash is less than `length` past `from`, and some others.
    template <class Visit>
    void for_range(uint64_t from, uint64_t length, Visit visit) const {
        index_.for_range(from, length, visit);
    }

    // ---- snapshots ----

    void begin_snapshot(Cut cut) {
        visited_ ^= 1;
        snapshot_ = true;
        cut_ = cut;
        cursor_ = 0;
        end_ = used_;
        saved_.clear();
        if (cut == Cut::peek) return;
        cut_erased_.swap(erased_);
        erased_.clear();
        tracked_before_ = track_erased_;
        track_erased_ = true;
    }

    // Hands up to `most` slots' worth of records to emit(record); false when the cut has been visited in full.
    template <class Emit>
    bool visit_snapshot(size_t most, Emit emit) {
        const size_t stop = std::min(end_, cursor_ + most);
        for (; cursor_ < stop; ++cursor_) {
            const uint32_t slot = slot_at(cursor_);
            Header& h = header(slot);
            if (h.visited == visited_) continue;
            h.visited = visited_;
            if (!h.live) continue;
            sum_up(slot);
            if (cut_ != Cut::changed || h.dirty) emit(record(slot));
            if (cut_ != Cut::peek) h.dirty = 0;
        }
        if (cursor_ < end_) return true;
        for (size_t at = 0; at < saved_.size(); at += records_->stride()) {
            const auto* h = reinterpret_cast<const Header*>(saved_.data() + at);
            if (cut_ != Cut::changed || h->dirty) emit(saved_.data() + at);
        }
        saved_.clear();
        saved_.shrink_to_fit();
        return false;
    }

    const std::vector<int64_t>& cut_erased() const { return cut_erased_; }

    // The snapshot was written: what it holds counts as kept. Or it was given up: every row counts as changed, and
    // what was not known to be erased before it is not known now.
    void end_snapshot(bool kept) {
        snapshot_ = false;
        if (!kept) {
            for (size_t i = 0; i < used_; ++i) {
                Header& h = header(slot_at(i));
                h.visited = visited_;
                if (cut_ != Cut::peek) h.dirty = 1;
            }
            erased_.insert(erased_.begin(), cut_erased_.begin(), cut_erased_.end());
            if (cut_ != Cut::peek) track_erased_ &= tracked_before_;
        }
        saved_ = {};
        cut_erased_ = {};
    }

    // Rows just loaded from a snapshot count as kept by it.
    void settle() {
        for (size_t i = 0; i < used_; ++i) header(slot_at(i)).dirty = 0;
        erased_.clear();
        track_erased_ = true;
    }

    // Whether everything erased since the last kept snapshot is known, so that one of changes can be taken.
    bool tracks_erased() const { return track_erased_; }

private:
    static constexpr uint64_t kIdle = uint64_t{3} << 57;  // the flags `dirty` and `visited`, which mean nothing to another process

    uint32_t& sum(uint32_t slot) const { return *reinterpret_cast<uint32_t*>(record(slot) + kSum); }

    uint32_t sum_of(uint32_t slot) const {
        const Header& h = header(slot);
        uint64_t use;
        std::memcpy(&use, record(slot) + offsetof(Header, last), 8);
        const uint64_t head = salt_ + static_cast<uint64_t>(h.key) * 0xFF51AFD7ED558CCDull +
                              (uint64_t{slot} << 32 | h.clock) * 0xC4CEB9FE1A85EC53ull + mix(use & ~kIdle);
        const uint32_t made = fold(head + weigh(record(slot) + shape_.head, records_->stride() - shape_.head));
        return made == kStale ? kStale + 1 : made;
    }

    void make_stale(uint32_t slot) {
        if (notes_ != nullptr) sum(slot) = kStale;
    }

    void sum_up(uint32_t slot) {
        if (notes_ == nullptr || sum(slot) != kStale) return;
        in_order();
        sum(slot) = sum_of(slot);
    }

    // Whether a record is what was written, as far as it can be told.
    bool is_whole(uint32_t slot) const {
        if (sum(slot) == kStale || sum(slot) == sum_of(slot)) return true;
        std::byte* r = record(slot);
        uint64_t use;
        std::memcpy(&use, r + offsetof(Header, last), 8);
        return (use & ~kIdle) == 0 && std::all_of(r, r + offsetof(Header, last), is_zero) &&
               std::all_of(r + kSum, r + records_->stride(), is_zero);  // never used
    }
    static bool is_zero(std::byte b) { return b == std::byte{0}; }

    // A slot gets a row or loses it: until `end_move` it is not sure how many rows there are.
    void begin_move(uint32_t slot) {
        if (notes_ == nullptr) return;
        notes_->moves = 1;
        in_order();
        make_stale(slot);
        in_order();
        burn();
    }

    void end_move() {
        if (notes_ == nullptr) return;
        in_order();
        burn();
        notes_->rows = rows();
        in_order();
        burn();
        notes_->moves = 0;
    }

    // Without snapshots the list must not grow for ever: past a few times the rows it is given up.
    void remember_erased(int64_t key) {
        if (erased_.size() > 4 * rows() + 4096) {
            track_erased_ = false;
            erased_ = {};
            return;
        }
        erased_.push_back(key);
    }

    uint32_t slot_at(size_t i) const { return chunks_[i / Records::kChunk] + static_cast<uint32_t>(i % Records::kChunk); }

    void save_if_unvisited(uint32_t slot) {
        if (!snapshot_) return;
        Header& h = header(slot);
        if (h.visited == visited_) return;
        const std::byte* from = record(slot);
        saved_.insert(saved_.end(), from, from + records_->stride());
        h.visited = visited_;
    }

    void rebuild(size_t at_least) {
        const size_t grown = index_.buckets() + index_.buckets() / 2;
        const size_t buckets = std::max(Index::buckets_for(at_least), grown);
        index_.reset(buckets, shelf_->take(number_, Index::bytes_for(buckets)));
        constexpr size_t kAhead = 16;
        for (size_t i = 0; i < used_; ++i) {
            if (i + kAhead < used_) index_.prefetch(hash_key(header(slot_at(i + kAhead)).key));
            const Header& h = header(slot_at(i));
            if (h.live) index_.insert(hash_key(h.key), slot_at(i));
        }
    }

    std::vector<uint32_t> chunks_;  // first slots of its chunks, in the order they were taken
    size_t used_ = 0;               // slots taken, erased ones included
    std::vector<uint32_t> free_;
    size_t number_ = 0;       // in the table
    Shelf* shelf_ = nullptr;  // the table's, for indexes
    uint64_t salt_ = 0;  // the table's, for sums

    uint32_t visited_ = 0;
    Cut cut_ = Cut::full;
    bool snapshot_ = false, track_erased_ = false, tracked_before_ = false;
    size_t cursor_ = 0, end_ = 0;
    std::vector<std::byte> saved_;
    std::vector<int64_t> erased_, cut_erased_;
};

}  // namespace hotrow
