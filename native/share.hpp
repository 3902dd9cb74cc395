// One batch's keys of a table while a cache exchanges for them, a table's share of what one shard is asked, and the shard's
// answer to it, read and checked.
#pragma once

#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

#include "cache.hpp"
#include "exchange_blob.hpp"

namespace hotrow {

// The keys of a batch in one table, whose copies it holds.
struct HeldKeys {
    size_t table = 0;
    std::vector<int64_t> keys;
    std::vector<uint32_t> slots, generations;  // kNoSlot: the row is not here
    std::vector<uint32_t> clocks;              // of the copies, at the read
    std::vector<uint8_t> actions;
};

// One table's share of one shard's request.
struct Share {
    TableHead head{};
    bool asked = false;  // whether the request has it
    HeldKeys* batch = nullptr;
    std::vector<int64_t> written, checked, fetched;
    std::vector<uint32_t> wanted_at, checked_at, fetched_at;  // numbers of the keys in the batch
};

// A share with its answer. Its items are the keys wanted back, checked and fetched; in a flush all that were written.
struct Answered {
    const Share* share = nullptr;
    Copies* copies = nullptr;
    std::vector<int64_t> keys;
    std::vector<uint8_t> codes;
    std::vector<uint32_t> rows;  // for each item how many rows came for those before it
    const std::byte* values = nullptr;
    const float* state = nullptr;
    const uint32_t *clocks = nullptr, *told = nullptr;
    size_t written = 0, end = 0;
    uint32_t steps = 0, dropped = 0;

    Request request() const {
        Request r;
        r.store = &copies->store;
        r.keys = keys.data();
        r.n = keys.size();
        return r;
    }

    // The number in its batch of an item that is wanted, and where the batch has its slot.
    uint32_t index(size_t i) const {
        if (i < written) return share->wanted_at[i];
        i -= written;
        return i < share->checked.size() ? share->checked_at[i] : share->fetched_at[i - share->checked.size()];
    }
    uint32_t& place(size_t i) const { return share->batch->slots[index(i)]; }

    // Takes the items that matter out of the codes of all; says how many rows these promise.
    size_t take_items(const std::byte* all, bool flush) {
        uint32_t promised = 0;
        size_t item = 0;
        const auto take = [&](const std::vector<int64_t>& from, size_t most) {
            for (size_t i = 0; i < from.size(); ++i, ++item) {
                const Code code = code_at(all, item);
                if (i < most) {
                    keys.push_back(from[i]);
                    codes.push_back(code);
                    rows.push_back(promised);
                }
                promised += code == kRow;
            }
        };
        take(share->written, flush ? share->written.size() : share->wanted_at.size());
        written = keys.size();
        take(share->checked, share->checked.size());
        take(share->fetched, share->fetched.size());
        return promised;
    }
};

[[noreturn]] inline void refuse_answer() { throw std::invalid_argument("this is not the answer to the request of this cache"); }

// A shard's answer, table by table. Throws if it is not whole; nothing has changed then.
inline std::vector<std::unique_ptr<Answered>> read_answer(const Cache& cache, const std::vector<Share>& shares, bool flush,
                                                          const std::byte* blob, size_t size, AnswerHead& head) {
    if (size < sizeof head) refuse_answer();
    std::memcpy(&head, blob, sizeof head);
    if (head.magic != kAnswerMagic || head.version != kExchangeVersion) refuse_answer();
    Layout8 at(sizeof head);
    std::vector<std::unique_ptr<Answered>> out;
    for (size_t t = 0; t < shares.size(); ++t) {
        const Share& share = shares[t];
        if (!share.asked) continue;
        TableAnswer said;
        if (size - at.end() < sizeof said) refuse_answer();
        std::memcpy(&said, blob + at.take(sizeof said), sizeof said);
        const size_t items = share.written.size() + share.checked.size() + share.fetched.size();
        if (said.table != t || said.rows > items) refuse_answer();
        auto a = std::make_unique<Answered>();
        a->share = &share;
        a->copies = cache.tables[t].get();
        const bool tell = cache.settings.sample != 0;
        const AnswerSections sections(at, items, said.rows, tell ? share.checked.size() : 0, a->copies->store.shape());
        if (at.end() > size) refuse_answer();
        a->values = blob + sections.values;
        a->state = reinterpret_cast<const float*>(blob + sections.state);
        a->clocks = reinterpret_cast<const uint32_t*>(blob + sections.clocks);
        if (tell) a->told = reinterpret_cast<const uint32_t*>(blob + sections.told);
        a->end = at.end();
        a->steps = said.steps;
        a->dropped = said.dropped;
        if (a->take_items(blob + sections.codes, flush) != said.rows) refuse_answer();
        out.push_back(std::move(a));
    }
    if (head.tables != out.size() || at.end() + size_t{head.notices} * 16 != size) refuse_answer();
    return out;
}

}  // namespace hotrow
