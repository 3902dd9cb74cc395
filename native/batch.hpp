// The batch calls over the rows of several tables: fetch, read, update, erase, import. store.hpp says how they lock.
#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "admission.hpp"
#include "store.hpp"

namespace hotrow {

// A range of one table's parts, worked on by one thread.
struct Piece {
    Request* request;
    size_t first, last;

    // Where in the request's order the piece's keys begin and end. A piece of all parts takes the keys as they come.
    size_t begin() const { return request->order.empty() ? 0 : request->bounds[first]; }
    size_t end() const { return request->order.empty() ? request->n : request->bounds[last]; }
    size_t key(size_t at) const { return request->order.empty() ? at : request->order[at]; }
};

// Sorts keys by part, and within one by where its index has them, so that neighbours share a huge page of it; those of a
// durable table as they come, for a push that is made again goes by their order.
inline void sort_by_part(Request& r) {
    const int bits = r.store->durable() == nullptr ? 6 : 0;
    std::vector<uint32_t> at((Store::kParts << bits) + 1, 0);
    std::vector<uint16_t> bins(r.n);
    for (size_t i = 0; i < r.n; ++i) {
        const uint64_t hash = hash_key(r.keys[i]);
        bins[i] = static_cast<uint16_t>(Store::part_of(hash) << bits | (bits == 0 ? 0 : hash >> (64 - bits)));
        ++at[bins[i] + 1];
    }
    for (size_t b = 1; b < at.size(); ++b) at[b] += at[b - 1];
    r.bounds.resize(Store::kParts + 1);
    for (size_t p = 0; p <= Store::kParts; ++p) r.bounds[p] = at[p << bits];
    r.order.resize(r.n);
    for (size_t i = 0; i < r.n; ++i) r.order[at[bins[i]]++] = static_cast<uint32_t>(i);
}

constexpr size_t kKeysAThread = 1024;  // fewer are done sooner than a thread is woken

// The requests' keys in pieces. Tables are pieces enough if there are many; a few large ones are cut by part.
inline std::vector<Piece> cut(const std::vector<Request*>& requests) {
    constexpr size_t kLeast = 2048;  // keys that are worth a piece
    const size_t threads = Pool::get().threads();
    size_t total = 0;
    for (const Request* r : requests) total += r->n;
    const size_t fair = threads == 1 ? total : std::max(kLeast, total / (4 * threads));
    std::vector<Piece> pieces;
    std::vector<Request*> sorted;
    for (Request* r : requests) {
        if (r->n == 0) continue;
        const size_t count = std::clamp<size_t>(r->n / fair, 1, Store::kParts);
        if (count > 1 && r->order.empty()) sorted.push_back(r);
        for (size_t k = 0; k < count; ++k)
            pieces.push_back({r, k * Store::kParts / count, (k + 1) * Store::kParts / count});
    }
    parallel_for(sorted.size(), [&](size_t k) { sort_by_part(*sorted[k]); });
    return pieces;
}

inline std::vector<Piece> cut(std::vector<Request>& requests) {
    std::vector<Request*> all;
    for (Request& r : requests) all.push_back(&r);
    return cut(all);
}

inline void nothing_more(const Piece&) {}

// Runs body(piece) on as many cores as the keys are worth, each piece with its parts locked, and after(piece) without.
template <class Body, class After = void (*)(const Piece&)>
void for_pieces(const std::vector<Piece>& pieces, Body body, After after = nothing_more) {
    size_t keys = 0;
    for (const Piece& piece : pieces) keys += piece.end() - piece.begin();
    parallel_for(pieces.size(), [&](size_t i) {
        const Piece& piece = pieces[i];
        const Store& store = *piece.request->store;
        for (size_t p = piece.first; p < piece.last; ++p) __builtin_prefetch(&store.part(p));
        {
            const PartLocks locks(store, piece.first, piece.last);
            body(piece);
        }
        after(piece);
    }, 1 + keys / kKeysAThread);
}

// Calls body(i, part, hash, slot) for every key of the piece, slot being kNoSlot where there is no row. With `guess`,
// r.slots says where rows were found before. Three stages run one behind the other, so that memory is always busy:
// a key's bucket is asked for, then its record, then the body works on what has arrived. Each stage does a block of
// keys in a short loop of its own: asking for memory waits for its address to be translated, and the waits of
// neighbours overlap only as far as a processor can look ahead.
template <class Body>
void for_keys(const Piece& piece, bool guess, Body body) {
    constexpr size_t kBlock = 8, kBlocks = 3;  // more would ask for more lines at once than a core can wait for
    const Request& r = *piece.request;
    const int64_t* keys = r.keys;
    const uint32_t* order = r.order.empty() ? nullptr : r.order.data();
    Part* parts = &r.store->part(0);
    const size_t begin = piece.begin(), n = piece.end() - begin;
    struct Stage {
        size_t i;
        uint64_t hash;
        Part* part;
        uint32_t slot;
    } stages[kBlocks][kBlock];
    const auto size = [&](size_t block) { return std::min(n - std::min(n, block * kBlock), kBlock); };
    for (size_t block = 0; block < (n + kBlock - 1) / kBlock + 2; ++block) {
        Stage* asked = stages[block % kBlocks];
        for (size_t k = 0; k < size(block); ++k) {
            Stage& s = asked[k];
            s.i = order == nullptr ? block * kBlock + k : order[begin + block * kBlock + k];
            s.hash = hash_key(keys[s.i]);
            s.part = parts + Store::part_of(s.hash);
            if (!guess) s.part->prefetch_bucket(s.hash);
        }
        if (block >= 1) {
            Stage* found = stages[(block - 1) % kBlocks];
            for (size_t k = 0; k < size(block - 1); ++k) {
                Stage& s = found[k];
                s.slot = guess ? r.slots[s.i] : s.part->candidate(s.hash);
                if (s.slot != kNoSlot) s.part->prefetch_record(s.slot);
            }
        }
        if (block >= 2) {
            const Stage* there = stages[(block - 2) % kBlocks];
            for (size_t k = 0; k < size(block - 2); ++k) {
                const Stage& s = there[k];
                body(s.i, *s.part, s.hash, s.part->find(keys[s.i], s.hash, s.slot));
            }
        }
    }
}

// As for_keys, with the table's dim: body(i, part, hash, slot, dim).
template <class Body>
void for_rows(const Piece& piece, bool guess, Body body) {
    with_dim(piece.request->store->shape().dim, [&](auto dim) {
        for_keys(piece, guess, [&](size_t i, Part& part, uint64_t hash, uint32_t slot) { body(i, part, hash, slot, dim); });
    });
}

// As for_changes in a durable table: each change is made whole or not at all, and those that the request's push made
// before its process died are passed over. Not inlined, for the sake of the other way.
template <class Body>
[[gnu::noinline]] void for_durable_changes(const Piece& piece, Durable& durable, Body body) {
    const Request& r = *piece.request;
    Trail trail(durable, r.push, piece.first, piece.last);
    for_rows(piece, r.slots != nullptr, [&](size_t i, Part& part, uint64_t hash, uint32_t slot, auto dim) {
        const size_t p = Store::part_of(hash);
        if (trail.passes(p) || slot == kNoSlot) return;
        trail.save(p, slot, part.record(slot));
        part.touch(slot);  // may need memory
        trail.arm(p);
        body(i, part, slot, dim);
        trail.commit(p);
    });
}

// Calls body(i, part, slot, dim) for every key of the piece that has a row, which the body changes.
template <class Body>
void for_changes(const Piece& piece, Body body) {
    const Request& r = *piece.request;
    if (r.store->durable() != nullptr) return for_durable_changes(piece, *r.store->durable(), body);
    for_rows(piece, r.slots != nullptr, [&](size_t i, Part& part, uint64_t, uint32_t slot, auto dim) {
        if (slot != kNoSlot) body(i, part, slot, dim);
    });
}

// Gives those of a request's keys that are admitted a row, and the others what theirs would start from.
inline void admit_and_insert(Request& request, uint32_t now) {
    Store& store = *request.store;
    std::lock_guard lock(store.admission_mutex);
    const std::vector<size_t> admitted = admit(request, now);
    std::vector<int64_t> keys(admitted.size()), positions(admitted.size());
    for (size_t k = 0; k < admitted.size(); ++k) {
        keys[k] = request.keys[admitted[k]];
        positions[k] = static_cast<int64_t>(request.position(admitted[k]));
    }
    std::vector<Request> wanted(1);
    wanted[0].store = &store;
    wanted[0].keys = keys.data();
    wanted[0].positions = positions.data();
    wanted[0].n = keys.size();
    wanted[0].rows = request.rows;
    for_pieces(cut(wanted), [&](const Piece& piece) {
        const Request& r = *piece.request;
        for_rows(piece, false, [&](size_t k, Part& part, uint64_t hash, uint32_t slot, auto dim) {
            if (slot != kNoSlot && store.expired(part.header(slot), now)) {  // not yet swept
                part.erase(slot);
                slot = kNoSlot;
            }
            if (slot == kNoSlot) {
                slot = store.insert(part, r.keys[k], hash, r.row(k, dim), now);
            } else {  // from another thread
                store.read_values(part, slot, r.row(k, dim), dim);
                part.use(slot, now);
            }
            request.slots[admitted[k]] = slot;
        });
    });
    parallel_for(2, [&](size_t half) {
        const size_t dim = store.shape().dim, middle = request.n / 2;
        for (size_t i = half == 0 ? 0 : middle; i < (half == 0 ? middle : request.n); ++i)
            if (request.slots[i] == kNoSlot) store.initial_values(request.keys[i], request.row(i, dim));
    });
}

// Where the rows of requests go that ask for results. A piece that has all of a table brings its rows to a place of its
// thread, which stays in cache, and pools them from there; rows of a table in several pieces are kept, and pooled when all
// are there.
class Pooled {
public:
    // `in_pieces`: whether each row is there when its piece has ended.
    template <class InPieces>
    Pooled(std::vector<Request>& requests, const std::vector<Piece>& pieces, InPieces in_pieces) {
        constexpr size_t kLeast = 8192;    // lookups that are worth more than one thread
        constexpr size_t kMost = 1 << 20;  // values that a thread keeps room for; more would not stay in its cache anyway
        size_t total = 0;
        for (const Request& r : requests)
            if (r.results != nullptr) total += r.grouping->tables[r.table].lookups;
        const size_t threads = Pool::get().threads(), fair = threads == 1 ? total : std::max(kLeast, total / (2 * threads));
        std::vector<bool> kept(requests.size(), true);
        for (const Piece& p : pieces)
            if (const Request& r = *p.request; p.last - p.first == Store::kParts && r.results != nullptr &&
                                               std::invoke(in_pieces, *r.store) && r.n * r.store->shape().dim <= kMost &&
                                               r.grouping->tables[r.table].lookups <= fair)
                kept[static_cast<size_t>(p.request - requests.data())] = false;
        for (size_t k = 0; k < requests.size(); ++k) {
            Request& r = requests[k];
            if (r.results == nullptr || !kept[k]) continue;
            results_ = r.results;
            grouping_ = r.grouping;
            rows_.emplace_back(std::max<size_t>(1, r.n * r.store->shape().dim));
            of_table_.resize(grouping_->tables.size(), nullptr);
            of_table_[r.table] = r.rows = rows_.back().data();
        }
    }

    // Where a piece's rows go: the same place until the thread's next piece.
    static float* rows(const Request& r) {
        if (r.rows != nullptr) return r.rows;
        thread_local std::vector<float> here;
        if (const size_t size = r.n * r.store->shape().dim; here.size() < size) here.resize(size);
        return here.data();
    }

    // To be called when a piece's rows are there.
    static void end(const Piece& piece) {
        const Request& r = *piece.request;
        if (r.rows == nullptr) r.grouping->pool_table(r.table, rows(r), *r.results);
    }

    // To be called when all are.
    void end() const {
        if (!of_table_.empty()) grouping_->forward(of_table_, *results_);
    }

private:
    const std::vector<Matrix>* results_ = nullptr;
    const Grouping* grouping_ = nullptr;
    std::vector<Buffer<float>> rows_;
    std::vector<const float*> of_table_;
};

// Rows for training at step `now`: counts the use, and gives new keys a row as the table's admission has it.
inline void fetch(std::vector<Request>& requests, uint32_t now) {
    const std::vector<Piece> pieces = cut(requests);
    const Pooled pooled(requests, pieces, &Store::inserts_at_once);
    for_pieces(pieces, [&](const Piece& piece) {
        const Request& r = *piece.request;
        const Store& store = *r.store;
        const bool at_once = store.inserts_at_once();
        float* rows = Pooled::rows(r);
        for_rows(piece, false, [&](size_t i, Part& part, uint64_t hash, uint32_t slot, auto dim) {
            float* to = rows + r.position(i) * dim;
            if (slot != kNoSlot && store.expired(part.header(slot), now)) slot = kNoSlot;
            if (slot != kNoSlot) {
                store.read_values(part, slot, to, dim);
                part.use(slot, now);
            } else if (at_once) {
                slot = store.insert(part, r.keys[i], hash, to, now);
            }
            r.slots[i] = slot;
        });
    }, Pooled::end);
    std::vector<Request> waiting;
    for (Request& r : requests)
        if (!r.store->inserts_at_once()) waiting.push_back(std::move(r));
    parallel_for(waiting.size(), [&](size_t k) { admit_and_insert(waiting[k], now); });
    pooled.end();
}

// Rows as they are at step `now`; changes nothing. A key without a row reads as the value its row would start from.
inline void read(std::vector<Request>& requests, uint32_t now) {
    const std::vector<Piece> pieces = cut(requests);
    const Pooled pooled(requests, pieces, [](const Store&) { return true; });
    for_pieces(pieces, [&](const Piece& piece) {
        const Request& r = *piece.request;
        const Store& store = *r.store;
        float* rows = Pooled::rows(r);
        for_rows(piece, false, [&](size_t i, Part& part, uint64_t, uint32_t slot, auto dim) {
            float* to = rows + r.position(i) * dim;
            if (slot == kNoSlot || store.expired(part.header(slot), now))
                store.initial_values(r.keys[i], to);
            else
                store.read_values(part, slot, to, dim);
        });
    }, Pooled::end);
    pooled.end();
}

// Applies one gradient to the row of each key; a key without a row loses its gradient. `slots` may be null.
inline void update(std::vector<Request>& requests) {
    for (Request& r : requests) r.step = Step(r.store->settings().optimizer, r.lr, r.store->next_step(r.push, r.n));
    for_pieces(cut(requests), [&](const Piece& piece) {
        const Request& r = *piece.request;
        const Store& store = *r.store;
        std::vector<float> scratch(3 * store.shape().dim);
        for_changes(piece, [&](size_t i, Part& part, uint32_t slot, auto dim) {
            store.update(part, slot, r.step, r.gradient(i, dim, scratch.data() + 2 * dim), scratch.data(), dim);
        });
    });
}

// Which keys have a row.
inline void contains(Request request, bool* out) {
    std::vector<Request> one;
    one.push_back(std::move(request));
    for_pieces(cut(one), [&](const Piece& piece) {
        for_keys(piece, false, [&](size_t i, Part&, uint64_t, uint32_t slot) { out[i] = slot != kNoSlot; });
    });
}

// Erases the rows of these keys; says how many there were.
inline size_t erase(Request request) {
    std::atomic<size_t> erased{0};
    std::vector<Request> one;
    one.push_back(std::move(request));
    for_pieces(cut(one), [&](const Piece& piece) {
        size_t count = 0;
        for_keys(piece, false, [&](size_t, Part& part, uint64_t, uint32_t slot) {
            if (slot == kNoSlot) return;
            part.erase(slot);
            ++count;
        });
        erased += count;
    });
    return erased;
}

// Writes rows as they are given, over those that are there. Without meta data a row counts as new.
struct Imported {
    const std::byte* values;
    const float* state;
    const uint32_t *clocks, *uses, *last;
};

inline void import_rows(Request request, const Imported& in) {
    Store& store = *request.store;
    std::vector<Request> one;
    one.push_back(std::move(request));
    const size_t bytes = store.shape().value_bytes(), floats = store.shape().state_dim;
    const auto write = [&](size_t i, Part& part, uint32_t slot) {
        std::memcpy(part.values(slot), in.values + i * bytes, bytes);
        std::copy_n(in.state + i * floats, floats, part.state(slot));
        Header& h = part.header(slot);
        h.clock = in.clocks[i];
        h.uses = std::min(in.uses[i], kMostUses);
        h.last = in.last[i];
    };
    for_pieces(cut(one), [&](const Piece& piece) {
        std::optional<Trail> trail;
        if (store.durable() != nullptr) trail.emplace(*store.durable(), Push{}, piece.first, piece.last);
        for_keys(piece, false, [&](size_t i, Part& part, uint64_t hash, uint32_t slot) {
            if (slot == kNoSlot) {
                part.insert(piece.request->keys[i], hash, [&](uint32_t made) { write(i, part, made); });
                return;
            }
            if (trail) trail->save(Store::part_of(hash), slot, part.record(slot));
            part.touch(slot);
            if (trail) trail->arm(Store::part_of(hash));
            write(i, part, slot);
            if (trail) trail->commit(Store::part_of(hash));
        });
    });
}

}  // namespace hotrow
