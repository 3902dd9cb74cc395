// How the bytes of an exchange between a cache and its server lie, and what both sides compute alike.
//
//     request: head | for each table: head, keys and clocks and changes written back, keys and clocks checked, keys fetched
//     answer:  head | for each table: head, codes of all its keys, clocks of rows, clocks told, values, state | notices
//
// Everything begins at a multiple of eight bytes, in the byte order of the machine.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include "store.hpp"

namespace hotrow {

constexpr uint32_t kUnbounded = 0xFFFFFFFF;
constexpr uint32_t kRequestMagic = 0x71585248, kAnswerMagic = 0x61585248;  // "HRXq", "HRXa"
constexpr uint16_t kExchangeVersion = 1;

// Flags of a request.
constexpr uint32_t kSole = 1;  // the cache is the only one: write-backs are rows, and nothing else changes them
constexpr uint32_t kTell = 2;  // the answer says the clock of every row that is checked

// What an answer says of a row, in two bits.
enum Code : uint8_t {
    kKept = 0,    // it is as the cache has it: a good copy, or a write-back that nobody came before
    kRow = 1,     // values, state and clock follow
    kFresh = 2,   // it is as rows start, at clock 0: the cache can make it itself
    kAbsent = 3,  // there is no such row; or of one that is not wanted back: it is another one than the cache has
};

struct RequestHead {
    uint32_t magic;
    uint16_t version, tables;
    uint64_t client, epoch, position;
    uint32_t step, bound, flags, unused;
};
struct TableHead {
    uint32_t table, steps;
    uint32_t written, wanted, checked, fetched;  // keys; of those written the first `wanted` are wanted back
    uint32_t start;                              // starts_like of the table
    uint32_t unused;
};
struct AnswerHead {
    uint32_t magic;
    uint16_t version, tables;
    uint64_t epoch, position;
    uint32_t notices, behind, conflicts, unused;
};
struct TableAnswer {
    uint32_t table, steps, rows, dropped;
};
static_assert(sizeof(RequestHead) == 48 && sizeof(TableHead) == 32 && sizeof(AnswerHead) == 40 && sizeof(TableAnswer) == 16);

// A blob is laid out, section after section, each from a multiple of eight bytes on, by whoever writes it and reads it.
class Layout8 {
public:
    explicit Layout8(size_t at = 0) : at_(at) {}
    size_t take(size_t bytes) {
        const size_t from = at_;
        at_ += (bytes + 7) / 8 * 8;
        return from;
    }
    size_t end() const { return at_; }

private:
    size_t at_;
};

// Where the sections of one table's request lie.
struct TableSections {
    size_t keys, clocks, values, state, checked, checked_clocks, fetched;

    TableSections(Layout8& at, const TableHead& h, const Shape& shape, bool sole)
        : keys(at.take(size_t{h.written} * 8)),
          clocks(at.take(size_t{h.written} * 8)),
          values(at.take(size_t{h.written} * (sole ? shape.value_bytes() : shape.dim * 4))),
          state(at.take(size_t{h.written} * shape.state_bytes())),
          checked(at.take(size_t{h.checked} * 8)),
          checked_clocks(at.take(size_t{h.checked} * 4)),
          fetched(at.take(size_t{h.fetched} * 8)) {}
};

// Where the sections of one table's answer lie.
struct AnswerSections {
    size_t codes, clocks, told, values, state;

    AnswerSections(Layout8& at, size_t items, size_t rows, size_t told_rows, const Shape& shape)
        : codes(at.take((items + 3) / 4)),
          clocks(at.take(rows * 4)),
          told(at.take(told_rows * 4)),
          values(at.take(rows * shape.value_bytes())),
          state(at.take(rows * shape.state_bytes())) {}
};

// The same number for stores whose rows have one shape and start alike: one can make the other's new rows.
inline uint32_t starts_like(const Store& store) {
    const StoreSettings& s = store.settings();
    uint64_t hash = mix(s.init.salt + kGolden * (1 + static_cast<uint64_t>(s.init.kind)));
    hash = mix(hash ^ std::bit_cast<uint32_t>(s.init.scale));
    hash = mix(hash ^ std::bit_cast<uint32_t>(s.optimizer.initial_state()));
    hash = mix(hash ^ (uint64_t{s.shape.dim} << 32 | s.shape.state_dim << 1 | static_cast<uint64_t>(s.shape.bf16)));
    return static_cast<uint32_t>(hash);
}

inline Code code_at(const std::byte* codes, size_t i) {
    return static_cast<Code>(static_cast<uint8_t>(codes[i / 4]) >> (i % 4 * 2) & 3);
}

inline uint32_t clock_after(uint32_t clock, uint32_t current) { return std::max(clock + 1, current); }

// row += change, as both sides of an exchange compute it. `clock` is that of the row afterwards: rounding draws from it.
inline void add_change(const Shape& shape, std::byte* values, float* state, const float* values_change,
                       const float* state_change, int64_t key, uint32_t clock, float* scratch) {
    if (shape.bf16) {
        auto* stored = reinterpret_cast<uint16_t*>(values);
        widen(stored, scratch, shape.dim);
        for (size_t j = 0; j < shape.dim; ++j) scratch[j] += values_change[j];
        round_stochastic(scratch, stored, shape.dim, key, clock);
    } else {
        auto* row = reinterpret_cast<float*>(values);
        for (size_t j = 0; j < shape.dim; ++j) row[j] += values_change[j];
    }
    for (size_t j = 0; j < shape.state_dim; ++j) state[j] += state_change[j];
}

}  // namespace hotrow
