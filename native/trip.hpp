// `Trip`: one batch's way through a cache. It is planned (which rows are here and good, which are to be fetched, checked or
// written back, who makes room), its requests go to the shards and their answers are absorbed; from then on all of the
// batch's rows are here and held, until it is released.
//
//     copy of a row                                                   the exchange carries
//     good                                                            nothing
//     good as far as known, but to be checked                         key and clock
//     more than the bound ahead of what it was taken over at          the change; the row back if others changed it
//     more than the bound behind what the server is known to have     key; the row back, under the copy's own changes
//     none                                                            key; the row back, unless it is as rows start
//     evicted, with changes                                           the change
//
// What others wrote back meanwhile comes with every answer. If that makes rows of this very batch too old, `go_again` asks
// for those once more.
#pragma once

#include <memory>
#include <vector>

#include "cache.hpp"
#include "share.hpp"
#include "wire.hpp"

namespace hotrow {

// A table's keys in a batch.
struct BatchKeys {
    size_t table;
    const int64_t* keys;
    size_t n;
};

class Trip {
public:
    explicit Trip(std::shared_ptr<Cache> cache) : cache_(std::move(cache)) {}
    Trip(const Trip&) = delete;
    ~Trip() { release(); }

    // Holds the batch's rows, and says which must be exchanged for. Nobody else plans or absorbs meanwhile.
    void plan(const std::vector<BatchKeys>& given, uint32_t step) {
        step_ = step;
        for (const BatchKeys& g : given) {
            batches_.push_back(std::make_unique<HeldKeys>());
            HeldKeys& b = *batches_.back();
            b.table = g.table;
            b.keys.assign(g.keys, g.keys + g.n);
            b.slots.assign(g.n, kNoSlot);
            b.generations.assign(g.n, 0);
            b.clocks.assign(g.n, 0);
            b.actions.assign(g.n, kFetch);
        }
        classify();
        std::vector<std::vector<int64_t>> victims(cache_->tables.size());
        size_t room = 0;
        for (const auto& b : batches_)
            for (size_t i = 0; i < b->keys.size(); ++i)
                if (b->slots[i] == kNoSlot) room += cache_->cost(b->table);
        for (const Cache::Victim& v : cache_->evict(room)) victims[v.table].push_back(v.key);
        write_requests(victims, false);
    }

    // Writes back these rows' changes; they stay.
    void plan_flush(const std::vector<BatchKeys>& given, uint32_t step) {
        step_ = step;
        flush_ = true;
        std::vector<std::vector<int64_t>> keys(cache_->tables.size());
        for (const BatchKeys& g : given) keys[g.table].assign(g.keys, g.keys + g.n);
        write_requests(keys, true);
    }

    // Empty where there is nothing to say to a shard.
    std::vector<std::vector<std::byte>> requests;

    // The answer of a shard, to its request. Throws, with nothing changed, if it is not one.
    void absorb(size_t shard, const std::byte* blob, size_t size) {
        AnswerHead head;
        if (shard >= requests.size() || requests[shard].empty()) refuse_answer();
        const auto parsed = read_answer(*cache_, shares_[shard], flush_, blob, size, head);
        cache_->counts.received_bytes += size;
        cache_->counts.sent_bytes += requests[shard].size();
        ++cache_->counts.exchanges;
        conflicts_ += head.conflicts;
        take_ledger(shard, head);
        std::vector<Request> all;
        for (const auto& p : parsed) {
            all.push_back(p->request());
            cache_->counts.dropped += p->dropped;
            Store& store = p->copies->store;
            if (!p->copies->joined && p->steps > store.steps()) store.set_steps(p->steps);
        }
        for_pieces(cut(all), [&](const Piece& piece) {
            Answered& p = *parsed[static_cast<size_t>(piece.request - all.data())];
            std::vector<float> scratch(p.copies->scratch_floats()), start(p.copies->store.shape().dim);
            std::vector<float> start_state(p.copies->store.shape().state_dim);
            for_keys(piece, false, [&](size_t i, Part& part, uint64_t hash, uint32_t slot) {
                absorb_row(p, i, part, hash, slot, scratch, start, start_state);
            });
        });
        take_notices(blob, head, parsed.empty() ? sizeof(AnswerHead) : parsed.back()->end);
    }

    // Rows of the batch that turned out to be too old since it was planned: new requests, if there are any.
    bool go_again() {
        for (auto& of_shard : shares_)
            for (size_t t = 0; t < of_shard.size(); ++t)
                if (of_shard[t].batch != nullptr) cache_->tables[t]->joined = true;
        requests.clear();
        shares_.clear();
        if (!noticed_) return false;
        noticed_ = false;
        size_t again = 0;
        for (auto& b : batches_) {
            std::vector<Request> one(1);
            one[0] = request(*b);
            std::atomic<size_t> found{0}, asked{0};
            Copies& copies = *cache_->tables[b->table];
            for_pieces(cut(one), [&](const Piece& piece) {
                for_keys(piece, true, [&](size_t i, Part& part, uint64_t, uint32_t slot) {
                    b->actions[i] = kValid;
                    if (slot == kNoSlot || !mine(copies, *b, i, slot)) return;
                    const Side& side = copies.side(slot);
                    const uint64_t clock = uint64_t{part.header(slot).clock} + side.held - 1;
                    b->clocks[i] = static_cast<uint32_t>(clock);
                    if (too_old(side, clock))
                        b->actions[i] = kFetch;
                    else if (side.doubt != cache_->doubt)
                        b->actions[i] = kCheck;
                    if (b->actions[i] == kFetch) ++found;
                    if (b->actions[i] != kValid) ++asked;
                });
            });
            again += asked;
            cache_->counts.invalid += found;
            cache_->counts.valid -= found;
        }
        if (again > 0) write_requests(std::vector<std::vector<int64_t>>(cache_->tables.size()), false);
        return again > 0;
    }

    // The batch is done with its rows.
    void release() {
        for (auto& b : batches_) {
            std::vector<Request> one(1);
            one[0] = request(*b);
            Copies& copies = *cache_->tables[b->table];
            for_pieces(cut(one), [&](const Piece& piece) {
                for_keys(piece, true, [&](size_t i, Part&, uint64_t, uint32_t slot) {
                    if (slot != kNoSlot && mine(copies, *b, i, slot)) --copies.side(slot).held;
                });
            });
        }
        batches_.clear();
    }

    uint32_t conflicts() const { return conflicts_; }

private:
    enum Action : uint8_t { kValid, kCheck, kWrite, kFetch };

    Request request(HeldKeys& b) const {
        Request r;
        r.store = &cache_->tables[b.table]->store;
        r.keys = b.keys.data();
        r.n = b.keys.size();
        r.slots = b.slots.data();
        return r;
    }

    static bool mine(const Copies& copies, const HeldKeys& b, size_t i, uint32_t slot) {
        return slot == b.slots[i] && copies.side(slot).generation == b.generations[i];
    }

    // Whether the server is known to be more than the bound ahead of a copy that has `clock` at the read.
    bool too_old(const Side& side, uint64_t clock) const {
        const uint32_t bound = cache_->settings.read_bound();
        return bound != kUnbounded && side.known > clock + bound;
    }

    void classify() {
        const CacheSettings& s = cache_->settings;
        std::vector<Request> requests_of;
        for (auto& b : batches_) requests_of.push_back(request(*b));
        for_pieces(cut(requests_of), [&](const Piece& piece) {
            HeldKeys& b = *batches_[static_cast<size_t>(piece.request - requests_of.data())];
            Copies& copies = *cache_->tables[b.table];
            size_t hits = 0, valid = 0;
            for_keys(piece, false, [&](size_t i, Part& part, uint64_t hash, uint32_t slot) {
                if (slot == kNoSlot) return;
                ++hits;
                Side& side = copies.side(slot);
                Header& h = part.header(slot);
                const uint64_t clock = uint64_t{h.clock} + side.held;  // each batch that holds the row is yet to update it
                ++side.held;
                h.last = step_;
                if (h.uses < kMostUses) h.uses = h.uses + 1;
                b.slots[i] = slot;
                b.generations[i] = side.generation;
                b.clocks[i] = static_cast<uint32_t>(clock);
                const bool too_far = s.bound != kUnbounded && clock > side.start + s.write_bound(side.start);
                const bool sampled = s.sample != 0 && (hash >> 40) % s.sample == 0;
                if (too_far && copies.is_dirty(part, slot))
                    b.actions[i] = kWrite;
                else if (too_old(side, clock))
                    b.actions[i] = kFetch;
                else if (copies.always_check || (side.doubt != cache_->doubt && !s.sole) || sampled)
                    b.actions[i] = kCheck;
                else
                    b.actions[i] = kValid;
                valid += b.actions[i] == kValid || b.actions[i] == kCheck;
            });
            cache_->counts.hits += hits;
            cache_->counts.valid += valid;
            cache_->counts.invalid += hits - valid;
            cache_->counts.misses += piece.end() - piece.begin() - hits;
        });
    }

    // Every shard's request; `written` are keys of rows to write back that no batch wants, by table.
    void write_requests(const std::vector<std::vector<int64_t>>& written, bool all_tables) {
        const CacheSettings& s = cache_->settings;
        const size_t tables = cache_->tables.size();
        shares_.assign(s.shards, std::vector<Share>(tables));
        for (auto& b : batches_) {
            for (auto& of_shard : shares_) of_shard[b->table].batch = b.get();
            for (size_t i = 0; i < b->keys.size(); ++i) {
                if (b->actions[i] == kValid) continue;
                Share& share = shares_[shard_of(b->keys[i], s.shards)][b->table];
                const auto at = static_cast<uint32_t>(i);
                if (b->actions[i] == kWrite) share.written.push_back(b->keys[i]), share.wanted_at.push_back(at);
                if (b->actions[i] == kCheck) share.checked.push_back(b->keys[i]), share.checked_at.push_back(at);
                if (b->actions[i] == kFetch) share.fetched.push_back(b->keys[i]), share.fetched_at.push_back(at);
            }
        }
        for (size_t t = 0; t < tables; ++t)
            for (const int64_t key : written[t]) shares_[shard_of(key, s.shards)][t].written.push_back(key);
        requests.resize(s.shards);
        for (size_t shard = 0; shard < s.shards; ++shard) write_request(shard, all_tables);
    }

    // How many copies are held by a batch and must stay right, whoever else changed the row: those come first.
    size_t held_first(size_t table, std::vector<int64_t>& keys) const {
        Copies& copies = *cache_->tables[table];
        const auto held = std::stable_partition(keys.begin(), keys.end(), [&](int64_t key) {
            const uint64_t hash = hash_key(key);
            const size_t p = Store::part_of(hash);
            const PartLocks lock(copies.store, p, p + 1);
            const uint32_t slot = copies.store.part(p).find(key, hash);
            return slot != kNoSlot && copies.side(slot).held != 0;
        });
        return static_cast<size_t>(held - keys.begin());
    }

    void write_request(size_t shard, bool all_tables) {
        const CacheSettings& s = cache_->settings;
        std::vector<Share*> shares;
        for (size_t t = 0; t < shares_[shard].size(); ++t) {
            Share& share = shares_[shard][t];
            const size_t wanted = flush_ ? held_first(t, share.written) : share.wanted_at.size();
            share.head = {static_cast<uint32_t>(t), static_cast<uint32_t>(cache_->tables[t]->store.steps()),
                          static_cast<uint32_t>(share.written.size()), static_cast<uint32_t>(wanted),
                          static_cast<uint32_t>(share.checked.size()), static_cast<uint32_t>(share.fetched.size()),
                          starts_like(cache_->tables[t]->store), 0};
            if (all_tables || share.written.size() + share.checked.size() + share.fetched.size() > 0)
                share.asked = true, shares.push_back(&share);
        }
        // Whoever shares the rows asks even if nothing is wanted: what others changed comes with the answer.
        if (shares.empty() && (s.sole || s.bound == kUnbounded)) return;
        const RequestHead head{kRequestMagic, kExchangeVersion, static_cast<uint16_t>(shares.size()), s.client, cache_->epochs[shard],
                               cache_->positions[shard], step_, s.read_bound(),
                               (s.sole ? kSole : 0) | (s.sample != 0 ? kTell : 0), 0};
        Layout8 at(sizeof head);
        std::vector<TableSections> sections;
        std::vector<size_t> heads;
        for (const Share* share : shares) {
            heads.push_back(at.take(sizeof(TableHead)));
            sections.emplace_back(at, share->head, cache_->tables[share->head.table]->store.shape(), s.sole);
        }
        std::vector<std::byte>& blob = requests[shard];
        blob.assign(at.end(), std::byte{0});
        std::memcpy(blob.data(), &head, sizeof head);
        for (size_t k = 0; k < shares.size(); ++k) {
            std::memcpy(blob.data() + heads[k], &shares[k]->head, sizeof(TableHead));
            write_share(*shares[k], sections[k], blob.data());
        }
    }

    void write_share(const Share& share, const TableSections& at, std::byte* blob) {
        std::copy(share.written.begin(), share.written.end(), reinterpret_cast<int64_t*>(blob + at.keys));
        std::copy(share.checked.begin(), share.checked.end(), reinterpret_cast<int64_t*>(blob + at.checked));
        std::copy(share.fetched.begin(), share.fetched.end(), reinterpret_cast<int64_t*>(blob + at.fetched));
        for (size_t i = 0; i < share.checked.size(); ++i)
            reinterpret_cast<uint32_t*>(blob + at.checked_clocks)[i] = share.batch->clocks[share.checked_at[i]];
        cache_->counts.written_rows += share.written.size();
        cache_->counts.fetched_rows += share.fetched.size();
        cache_->counts.checked += share.checked.size();
        Copies& copies = *cache_->tables[share.head.table];
        const Shape& shape = copies.store.shape();
        const size_t bytes = cache_->settings.sole ? shape.value_bytes() : shape.dim * 4;
        std::vector<Request> one(1);
        one[0].store = &copies.store;
        one[0].keys = share.written.data();
        one[0].n = share.written.size();
        for_pieces(cut(one), [&](const Piece& piece) {
            std::vector<float> scratch(shape.dim);
            for_keys(piece, false, [&](size_t i, Part& part, uint64_t hash, uint32_t slot) {
                if (slot == kNoSlot) throw std::logic_error("a row to be written back is not in the cache");
                copies.capture(part, slot, reinterpret_cast<uint32_t*>(blob + at.clocks) + 2 * i, blob + at.values + i * bytes,
                               reinterpret_cast<float*>(blob + at.state) + i * shape.state_dim, scratch.data());
                if (!flush_ && i >= share.wanted_at.size()) copies.erase(part, slot, hash);
            });
        });
    }

    void absorb_row(Answered& p, size_t i, Part& part, uint64_t hash, uint32_t slot, std::vector<float>& scratch,
                    std::vector<float>& start, std::vector<float>& start_state) {
        Copies& copies = *p.copies;
        const Share& share = *p.share;
        const Code code = static_cast<Code>(p.codes[i]);
        const bool checked = i >= p.written && i < p.written + share.checked.size();
        if (slot != kNoSlot && code != kAbsent) copies.side(slot).doubt = cache_->doubt;
        if (code == kKept) {
            if (checked && slot != kNoSlot && p.told != nullptr) {
                const uint32_t told = p.told[i - p.written], clock = share.batch->clocks[share.checked_at[i - p.written]];
                copies.side(slot).known = std::max(copies.side(slot).known, told);
                cache_->counts.count_behind(told > clock ? told - clock : 0);
            }
            return;
        }
        if (checked) --cache_->counts.valid, ++cache_->counts.invalid;
        if (code == kAbsent) {
            if (slot != kNoSlot) copies.erase(part, slot, hash);
            if (slot != kNoSlot && !flush_) p.place(i) = kNoSlot;
            return;
        }
        Copies::Given row{};
        if (code == kRow) {
            row = {p.values + p.rows[i] * copies.store.shape().value_bytes(),
                   p.state + p.rows[i] * copies.store.shape().state_dim, p.clocks[p.rows[i]]};
        } else {
            row = {start_values(copies, p.keys[i], start), start_state.data(), 0};
            start_state.assign(start_state.size(), copies.store.settings().optimizer.initial_state());
            ++cache_->counts.fresh_rows;
        }
        if (slot == kNoSlot) {
            slot = copies.insert(part, p.keys[i], hash, row, step_);
            copies.side(slot).doubt = cache_->doubt;
            p.place(i) = slot;
            share.batch->generations[p.index(i)] = copies.side(slot).generation;
        } else if (cache_->settings.sole) {
            if (code == kFresh) copies.reset(part, slot, row);
        } else {
            copies.rebase(part, slot, row, scratch);
        }
    }

    static const std::byte* start_values(const Copies& copies, int64_t key, std::vector<float>& scratch) {
        copies.store.initial_values(key, scratch.data());
        if (copies.store.shape().bf16) {  // in place: a rounded value lies no further on than the one it is made of
            auto* rounded = reinterpret_cast<uint16_t*>(scratch.data());
            for (size_t j = 0; j < scratch.size(); ++j) {
                const uint16_t bits = nearest_bf16(scratch[j]);
                std::memcpy(rounded + j, &bits, 2);
            }
        }
        return reinterpret_cast<const std::byte*>(scratch.data());
    }

    void take_ledger(size_t shard, const AnswerHead& head) {
        if (cache_->settings.sole) return;
        const bool first = cache_->epochs[shard] == 0;
        cache_->epochs[shard] = head.epoch;
        cache_->positions[shard] = head.position;
        if (head.behind != 0 && !first) ++cache_->doubt, noticed_ = true;
    }

    void take_notices(const std::byte* blob, const AnswerHead& head, size_t from) {
        Layout8 at(from);
        const auto* keys = reinterpret_cast<const int64_t*>(blob + at.take(size_t{head.notices} * 8));
        const auto* details = reinterpret_cast<const uint32_t*>(blob + at.take(size_t{head.notices} * 8));
        for (size_t i = 0; i < head.notices; ++i) {
            if (details[2 * i] >= cache_->tables.size()) continue;
            Copies& copies = *cache_->tables[details[2 * i]];
            const uint64_t hash = hash_key(keys[i]);
            const size_t p = Store::part_of(hash);
            const PartLocks lock(copies.store, p, p + 1);
            const uint32_t slot = copies.store.part(p).find(keys[i], hash);
            if (slot == kNoSlot) continue;
            Side& side = copies.side(slot);
            if (details[2 * i + 1] > side.known) side.known = details[2 * i + 1], noticed_ = true;
        }
    }

    std::shared_ptr<Cache> cache_;
    uint32_t step_ = 0, conflicts_ = 0;
    bool flush_ = false, noticed_ = false;
    std::vector<std::unique_ptr<HeldKeys>> batches_;
    std::vector<std::vector<Share>> shares_;  // by shard and table
};

}  // namespace hotrow
