// The server's side of a cache: what came to be changed elsewhere is written back, and rows are given that a cache lacks.
// One blob of bytes in, one out, for all tables of a process: whoever carries them looks at nothing in them.
//
// A write-back is the change of a row and of its optimizer state since the cache took it over at clock `start`, `current`
// being the clock it has there now. A cache that has the rows to itself sends the row as it is instead, to be taken bit
// for bit; that somebody else changed it meanwhile is then an error. The row's clock becomes max(clock + 1, current):
// HET takes max(clock, current), under which a change can leave the clock where it was, and then neither a copy nor
// a write-back could tell that the row is another one. It never runs behind HET's, so every bound of HET's holds.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "batch.hpp"
#include "exchange_blob.hpp"
#include "ledger.hpp"

namespace hotrow {

// One table's request, and what the answer says of each of its keys: those written, then checked, then fetched.
struct Asking {
    TableHead head;
    Store* store;
    const std::byte* blob;
    TableSections at;
    std::vector<uint8_t> codes;
    std::vector<uint32_t> told;
    std::vector<int64_t> row_keys;  // those whose row the answer carries, in their order
    std::atomic<uint32_t> dropped{0}, conflicts{0};

    Asking(const TableHead& h, Store* s, const std::byte* b, const TableSections& sections, bool tell)
        : head(h), store(s), blob(b), at(sections), codes(items(), kUnseen), told(tell ? h.checked : 0) {}

    static constexpr uint8_t kUnseen = 4;

    size_t items() const { return size_t{head.written} + head.checked + head.fetched; }
    template <class T>
    const T* section(size_t from) const {
        return reinterpret_cast<const T*>(blob + from);
    }
    int64_t key(size_t item) const {
        if (item < head.written) return section<int64_t>(at.keys)[item];
        item -= head.written;
        return item < head.checked ? section<int64_t>(at.checked)[item] : section<int64_t>(at.fetched)[item - head.checked];
    }
    Request request(size_t from, size_t n) const {
        Request r;
        r.store = store;
        r.keys = section<int64_t>(from);
        r.n = n;
        return r;
    }
};

// Answers one request; several threads may answer at once. A row is read and changed under its part's lock.
class Answer {
public:
    // Checks all of the request and touches nothing yet. `blob` begins at a multiple of eight bytes.
    Answer(const std::vector<Store*>& stores, const std::byte* blob, size_t size) {
        if (size < sizeof(RequestHead)) refuse();
        std::memcpy(&head_, blob, sizeof head_);
        if (head_.magic != kRequestMagic || head_.version != kExchangeVersion || head_.tables > stores.size()) refuse();
        sole_ = (head_.flags & kSole) != 0;
        Layout8 at(sizeof(RequestHead));
        std::vector<bool> seen(stores.size());
        asking_.reserve(head_.tables);
        for (size_t k = 0; k < head_.tables; ++k) {
            TableHead h;
            if (size - at.end() < sizeof h) refuse();
            std::memcpy(&h, blob + at.take(sizeof h), sizeof h);
            if (h.table >= stores.size() || seen[h.table] || h.wanted > h.written) refuse();
            if (h.start != starts_like(*stores[h.table]))
                throw std::invalid_argument("the cache and the rows behind it have another seed or other tables");
            if (uint64_t{h.written} + h.checked + h.fetched > size / 8) refuse();  // so that no size overflows
            seen[h.table] = true;
            const TableSections sections(at, h, stores[h.table]->shape(), sole_);
            if (at.end() > size) refuse();
            asking_.push_back(std::make_unique<Asking>(h, stores[h.table], blob, sections, (head_.flags & kTell) != 0));
        }
        if (at.end() != size) refuse();
    }

    // `again`: the write-backs were applied when the request came before. `push` names the request to durable tables, which
    // pass over what of it they did before their process died.
    std::vector<std::byte> make(Ledger& ledger, bool again, const Push& push) {
        auto since = sole_ ? Ledger::Since{0, false, {}}
                           : ledger.since(head_.epoch, head_.position, head_.client, head_.bound);
        for (auto& a : asking_)
            a->store->raise_steps(a->head.steps);
        if (!again) write_back(ledger, push);
        check();
        find_wanted();
        return written(ledger, since);
    }

private:
    [[noreturn]] static void refuse() { throw std::invalid_argument("this is not a whole request of a cache for these tables"); }

    void write_back(Ledger& ledger, const Push& push) {
        std::vector<Request> requests;
        for (auto& a : asking_) {
            requests.push_back(a->request(a->at.keys, a->head.written));
            requests.back().push = push;
            a->store->begin_push(push, a->head.written);
        }
        for_pieces(cut(requests), [&](const Piece& piece) {
            Asking& a = *asking_[static_cast<size_t>(piece.request - requests.data())];
            const Shape& shape = a.store->shape();
            const auto* clocks = a.section<uint32_t>(a.at.clocks);
            std::vector<float> scratch(shape.dim);
            std::vector<Ledger::Entry> entries;
            for_changes(piece, [&](size_t i, Part& part, uint32_t slot, auto) {
                Header& h = part.header(slot);
                if (a.store->expired(h, head_.step)) return;
                const uint32_t start = clocks[2 * i], current = clocks[2 * i + 1];
                const bool moved = h.clock != start;
                const float* state = a.section<float>(a.at.state) + i * shape.state_dim;
                if (sole_ && moved) {
                    ++a.conflicts;
                    return;
                }
                part.touch(slot);
                if (sole_) {
                    h.clock = current;
                    std::memcpy(part.values(slot), a.blob + a.at.values + i * shape.value_bytes(), shape.value_bytes());
                    std::copy_n(state, shape.state_dim, part.state(slot));
                } else {
                    h.clock = clock_after(h.clock, current);
                    add_change(shape, part.values(slot), part.state(slot), a.section<float>(a.at.values) + i * shape.dim,
                               state, h.key, h.clock, scratch.data());
                    entries.push_back({h.key, head_.client, h.clock, a.head.table});
                }
                if (i < a.head.wanted) part.use(slot, head_.step);
                a.codes[i] = !moved ? kKept : i < a.head.wanted ? kRow : kAbsent;
            });
            if (!entries.empty()) ledger.append(entries);  // while the parts are locked: no answer sees one without the other
        });
        for (auto& a : asking_)
            for (size_t i = 0; i < a->head.written; ++i) a->dropped += a->codes[i] == Asking::kUnseen;
    }

    // Which of the rows to be checked are good still.
    void check() {
        std::vector<Request> requests;
        for (auto& a : asking_) requests.push_back(a->request(a->at.checked, a->head.checked));
        for_pieces(cut(requests), [&](const Piece& piece) {
            Asking& a = *asking_[static_cast<size_t>(piece.request - requests.data())];
            const auto* clocks = a.section<uint32_t>(a.at.checked_clocks);
            for_keys(piece, false, [&](size_t i, Part& part, uint64_t, uint32_t slot) {
                if (slot == kNoSlot || a.store->expired(part.header(slot), head_.step)) return;
                part.use(slot, head_.step);
                const uint32_t clock = part.header(slot).clock;
                if (!a.told.empty()) a.told[i] = clock;
                const bool good = head_.bound == kUnbounded || clock <= uint64_t{clocks[i]} + head_.bound;
                a.codes[a.head.written + i] = good ? kKept : kRow;
            });
        });
    }

    // Everything else that is wanted: rows to fetch, and those whose row was gone when they were written back or checked.
    void find_wanted() {
        std::vector<std::vector<uint32_t>> items(asking_.size());
        std::vector<std::vector<int64_t>> keys(asking_.size());
        std::vector<std::vector<uint32_t>> slots(asking_.size());
        std::vector<std::vector<float>> rows(asking_.size());
        std::vector<Request> requests;
        for (size_t k = 0; k < asking_.size(); ++k) {
            Asking& a = *asking_[k];
            for (size_t i = 0; i < a.items(); ++i) {
                if (a.codes[i] != Asking::kUnseen) continue;
                if (i >= a.head.wanted && i < a.head.written) {
                    a.codes[i] = kAbsent;
                    continue;
                }
                items[k].push_back(static_cast<uint32_t>(i));
                keys[k].push_back(a.key(i));
            }
            slots[k].resize(keys[k].size());
            rows[k].resize(keys[k].size() * a.store->shape().dim);
            Request r;
            r.store = a.store;
            r.keys = keys[k].data();
            r.n = keys[k].size();
            r.rows = rows[k].data();
            r.slots = slots[k].data();
            requests.push_back(std::move(r));
        }
        fetch(requests, head_.step);
        for (size_t k = 0; k < asking_.size(); ++k) say_fresh(*asking_[k], items[k], keys[k], slots[k], rows[k]);
    }

    // A row at clock 0 need not be sent if it is what any cache can make of the key; one may have been imported so.
    void say_fresh(Asking& a, const std::vector<uint32_t>& items, const std::vector<int64_t>& keys,
                   std::vector<uint32_t>& slots, const std::vector<float>& rows) const {
        std::vector<Request> one(1);
        one[0].store = a.store;
        one[0].keys = keys.data();
        one[0].n = keys.size();
        one[0].slots = slots.data();
        const Shape& shape = a.store->shape();
        for_pieces(cut(one), [&](const Piece& piece) {
            std::vector<float> start(shape.dim);
            for_keys(piece, true, [&](size_t i, Part& part, uint64_t, uint32_t slot) {
                uint8_t& code = a.codes[items[i]];
                if (slot == kNoSlot) {
                    code = kAbsent;
                    return;
                }
                code = kRow;
                if (part.header(slot).clock != 0) return;
                a.store->initial_values(keys[i], start.data());
                const float* state = part.state(slot);
                const float first = a.store->settings().optimizer.initial_state();
                const bool same = std::memcmp(start.data(), rows.data() + i * shape.dim, shape.dim * 4) == 0 &&
                                  std::all_of(state, state + shape.state_dim, [&](float x) { return x == first; });
                if (same) code = kFresh;
            });
        });
    }

    std::vector<std::byte> written(const Ledger& ledger, const Ledger::Since& since) {
        Layout8 at(sizeof(AnswerHead));
        std::vector<size_t> heads;
        std::vector<AnswerSections> sections;
        AnswerHead head{kAnswerMagic, kExchangeVersion, head_.tables, ledger.epoch(), since.position,
                        static_cast<uint32_t>(since.entries.size()), since.behind, 0, 0};
        for (auto& a : asking_) {
            for (size_t i = 0; i < a->items(); ++i)
                if (a->codes[i] == kRow) a->row_keys.push_back(a->key(i));
            heads.push_back(at.take(sizeof(TableAnswer)));
            sections.emplace_back(at, a->items(), a->row_keys.size(), a->told.size(), a->store->shape());
            head.conflicts += a->conflicts;
        }
        const size_t notices = at.take(since.entries.size() * 8), details = at.take(since.entries.size() * 8);
        std::vector<std::byte> out(at.end());
        std::memcpy(out.data(), &head, sizeof head);
        std::vector<Request> requests;
        for (size_t k = 0; k < asking_.size(); ++k) {
            Asking& a = *asking_[k];
            const TableAnswer said{a.head.table, static_cast<uint32_t>(a.store->steps()),
                                   static_cast<uint32_t>(a.row_keys.size()), a.dropped};
            std::memcpy(out.data() + heads[k], &said, sizeof said);
            for (size_t i = 0; i < a.items(); ++i)
                out[sections[k].codes + i / 4] |= static_cast<std::byte>(a.codes[i] << (i % 4 * 2));
            if (!a.told.empty()) std::memcpy(out.data() + sections[k].told, a.told.data(), a.told.size() * 4);
            Request r;
            r.store = a.store;
            r.keys = a.row_keys.data();
            r.n = a.row_keys.size();
            requests.push_back(std::move(r));
        }
        copy_rows(requests, sections, out.data());
        for (size_t i = 0; i < since.entries.size(); ++i) {
            const Ledger::Entry& e = since.entries[i];
            const uint32_t detail[2] = {e.table, e.clock};
            std::memcpy(out.data() + notices + 8 * i, &e.key, 8);
            std::memcpy(out.data() + details + 8 * i, detail, 8);
        }
        return out;
    }

    // A row that was erased since it was found is as rows start.
    static void copy_rows(std::vector<Request>& requests, const std::vector<AnswerSections>& sections, std::byte* out) {
        for_pieces(cut(requests), [&](const Piece& piece) {
            const Request& r = *piece.request;
            const AnswerSections& at = sections[static_cast<size_t>(&r - requests.data())];
            const Shape& shape = r.store->shape();
            std::vector<float> start(shape.dim);
            for_keys(piece, false, [&](size_t i, Part& part, uint64_t, uint32_t slot) {
                std::byte* values = out + at.values + i * shape.value_bytes();
                auto* state = reinterpret_cast<float*>(out + at.state) + i * shape.state_dim;
                auto* clock = reinterpret_cast<uint32_t*>(out + at.clocks) + i;
                if (slot != kNoSlot) {
                    std::memcpy(values, part.values(slot), shape.value_bytes());
                    std::copy_n(part.state(slot), shape.state_dim, state);
                    *clock = part.header(slot).clock;
                    return;
                }
                r.store->initial_values(r.keys[i], start.data());
                if (shape.bf16)
                    round_nearest(start.data(), reinterpret_cast<uint16_t*>(values), shape.dim);
                else
                    std::memcpy(values, start.data(), shape.dim * 4);
                std::fill_n(state, shape.state_dim, r.store->settings().optimizer.initial_state());
                *clock = 0;
            });
        });
    }

    RequestHead head_{};
    bool sole_ = false;
    std::vector<std::unique_ptr<Asking>> asking_;
};

}  // namespace hotrow
