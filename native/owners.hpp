// Keys on their way to the rank that answers them, and rows and gradients between the two.
//
// `Outgoing` sorts a batch's keys by who answers them: what goes to one member lies together, table after table, in
// the order the keys were given. `Incoming` is the other end: the keys that all members asked for, each once, and
// where in the members' messages it stands. Both know how rows lie in the flat arrays of their side, so a row is
// copied once into a message and once out of it, rounded on the way where the wire is narrower than float32.
//
// Gradients of one row are summed member after member, those of a node first and then node after node, by one thread:
// the same bits every time, whichever way they took.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "grouping.hpp"
#include "hash.hpp"
#include "row_wire.hpp"
#include "threads.hpp"

namespace hotrow {

// The rank that owns a key. The row index tells keys apart by the lowest bits of the hash and parts by the next four, so
// neither is used here: or every row of a rank would look alike to them.
inline uint32_t owner_of(int64_t key, uint32_t ranks) { return static_cast<uint32_t>(hash_key(key) >> 12) % ranks; }

// Which member of a group of ranks answers a key: its owner's number divided by `divide`, modulo `members`.
struct Rule {
    uint32_t ranks = 1, divide = 1, members = 1;
    uint32_t member(int64_t key) const { return owner_of(key, ranks) / divide % members; }
};

// A table's keys in a batch, and where their rows lie: that of keys[i] at start + p * dim, p being positions[i] or i.
struct Asked {
    const int64_t* keys = nullptr;
    const int64_t* positions = nullptr;
    const int32_t* repeats = nullptr;  // how often each key is sent; once where there are none
    size_t n = 0, start = 0, dim = 1;
};

// Rows that lie together in a message: those of one table from or to one member.
struct Stretch {
    size_t first = 0, count = 0;  // rows in the message
    size_t byte = 0, dim = 1;     // where they begin, and the dim of each
};

// The stretches of a message with counts[member * tables + table] rows.
inline std::vector<Stretch> stretches_of(const int64_t* counts, size_t members, const std::vector<size_t>& dims, Wire wire) {
    std::vector<Stretch> out;
    size_t row = 0, byte = 0;
    for (size_t m = 0; m < members; ++m)
        for (size_t t = 0; t < dims.size(); ++t) {
            const auto n = static_cast<size_t>(counts[m * dims.size() + t]);
            out.push_back({row, n, byte, dims[t]});
            row += n;
            byte += n * wire_bytes(dims[t], wire);
        }
    return out;
}

inline size_t bytes_of(const std::vector<Stretch>& stretches, Wire wire) {
    if (stretches.empty()) return 0;
    return stretches.back().byte + stretches.back().count * wire_bytes(stretches.back().dim, wire);
}

// Calls body(row of the message, where it lies in it, its dim) for every row, in blocks on all cores: each row is one
// thread's.
template <class Body>
void for_message(const std::vector<Stretch>& stretches, Wire wire, Body body) {
    constexpr size_t kBlock = 512;
    struct Block {
        const Stretch* stretch;
        size_t begin, end;
    };
    std::vector<Block> blocks;
    size_t rows = 0;
    for (const Stretch& s : stretches) {
        rows += s.count;
        for (size_t at = 0; at < s.count; at += kBlock) blocks.push_back({&s, at, std::min(s.count, at + kBlock)});
    }
    parallel_for(blocks.size(), [&](size_t b) {
        const Stretch& s = *blocks[b].stretch;
        const size_t bytes = wire_bytes(s.dim, wire);
        for (size_t i = blocks[b].begin; i < blocks[b].end; ++i) body(s.first + i, s.byte + i * bytes, s.dim);
    }, 1 + rows / 2048);
}

class Outgoing {
public:
    Outgoing(const std::vector<Asked>& tables, const Rule& rule) : members_(rule.members) {
        const size_t n = tables.size();
        counts.assign(members_ * n, 0);
        for (const Asked& t : tables) dims_.push_back(t.dim);
        std::vector<std::vector<uint32_t>> member(n);
        parallel_for(n, [&](size_t t) {  // each its own table's column of the counts
            const Asked& a = tables[t];
            member[t].resize(a.n);
            for (size_t i = 0; i < a.n; ++i) {
                member[t][i] = rule.member(a.keys[i]);
                counts[member[t][i] * n + t] += a.repeats == nullptr ? 1 : a.repeats[i];
            }
        });
        std::vector<size_t> next(counts.size());
        size_t total = 0;
        for (size_t s = 0; s < counts.size(); ++s) {
            next[s] = total;
            total += static_cast<size_t>(counts[s]);
        }
        keys.resize(total);
        places_.resize(total);
        parallel_for(n, [&](size_t t) {  // each its own table's stretches
            const Asked& a = tables[t];
            for (size_t i = 0; i < a.n; ++i) {
                const auto p = a.positions == nullptr ? i : static_cast<size_t>(a.positions[i]);
                const auto place = static_cast<int64_t>(a.start + p * a.dim);
                const int32_t times = a.repeats == nullptr ? 1 : a.repeats[i];
                size_t& at = next[member[t][i] * n + t];
                for (int32_t k = 0; k < times; ++k, ++at) {
                    keys[at] = a.keys[i];
                    places_[at] = k == 0 ? place : ~place;  // a repeated row; its gradient was sent already
                }
            }
        });
        for (const Asked& a : tables) {
            size_t last = 0;
            for (size_t i = 0; a.positions != nullptr && i < a.n; ++i)
                last = std::max(last, static_cast<size_t>(a.positions[i]) + 1);
            if (a.positions == nullptr) last = a.n;
            if (last != 0) needed_ = std::max(needed_, a.start + last * a.dim);
        }
    }

    size_t bytes(Wire wire) const { return bytes_of(stretches(wire), wire); }

    // Rows, or gradients, from where they lie into a message.
    void pack(const float* from, size_t size, Wire wire, std::byte* message) const {
        if (size < needed_) throw std::invalid_argument("there are too few rows for the keys");
        for_message(stretches(wire), wire, [&](size_t row, size_t byte, size_t dim) {
            if (places_[row] >= 0)
                write_row(from + places_[row], dim, wire, message + byte);
            else
                write_zeros(dim, wire, message + byte);
        });
    }

    // Rows from an answer to where they lie.
    void unpack(const std::byte* message, size_t size, Wire wire, float* to, size_t room) const {
        const auto all = stretches(wire);
        if (room < needed_ || size != bytes_of(all, wire)) throw std::invalid_argument("the answer has another size");
        for_message(all, wire, [&](size_t row, size_t byte, size_t dim) {
            if (places_[row] >= 0) read_row(message + byte, dim, wire, to + places_[row]);
        });
    }

    std::vector<int64_t> keys;    // as they are sent
    std::vector<int64_t> counts;  // [member][table]

private:
    std::vector<Stretch> stretches(Wire wire) const { return stretches_of(counts.data(), members_, dims_, wire); }

    size_t members_;
    std::vector<size_t> dims_;
    std::vector<int64_t> places_;
    size_t needed_ = 0;
};

class Incoming {
public:
    // `counts` is [member][table]; keys lie in this order.
    Incoming(const int64_t* keys, size_t n, std::vector<int64_t> counts, std::vector<size_t> dims)
        : counts_(std::move(counts)), dims_(std::move(dims)) {
        const size_t tables = dims_.size();
        if (tables == 0 || counts_.size() % tables != 0) throw std::invalid_argument("each member needs a count a table");
        members_ = counts_.size() / tables;
        size_t total = 0;
        for (const int64_t count : counts_) {
            if (count < 0 || static_cast<size_t>(count) > n - total)
                throw std::invalid_argument("the counts are not those of the keys");
            total += static_cast<size_t>(count);
        }
        if (total != n) throw std::invalid_argument("the counts are not those of the keys");
        rows_.resize(tables);
        std::vector<std::vector<int64_t>> of_table(tables);
        std::vector<std::pair<const int64_t*, size_t>> sets(tables);
        parallel_for(tables, [&](size_t t) {
            for (size_t m = 0, at = 0; m < members_; ++m)
                for (size_t k = 0; k < tables; ++k) {
                    const auto count = static_cast<size_t>(counts_[m * tables + k]);
                    if (k == t) {
                        of_table[t].insert(of_table[t].end(), keys + at, keys + at + count);
                        for (size_t i = 0; i < count; ++i) rows_[t].push_back({at + i, static_cast<uint32_t>(m)});
                    }
                    at += count;
                }
            sets[t] = {of_table[t].data(), of_table[t].size()};
        });
        unique = dedup_all(sets);
        starts.assign(tables + 1, 0);
        for (size_t t = 0; t < tables; ++t) starts[t + 1] = starts[t] + unique[t].count * dims_[t];
        places_.resize(n);
        parallel_for(tables, [&](size_t t) {
            for (size_t i = 0; i < rows_[t].size(); ++i)
                places_[rows_[t][i].row] = starts[t] + static_cast<size_t>(unique[t].inverse[i]) * dims_[t];
        });
    }

    Incoming(const Incoming&) = delete;
    Incoming& operator=(const Incoming&) = delete;

    size_t bytes(Wire wire) const { return bytes_of(stretches(wire), wire); }

    // Each member's answer from the unique rows, which lie table after table.
    void answer(const float* rows, size_t size, Wire wire, std::byte* message) const {
        if (size < starts.back()) throw std::invalid_argument("there are too few rows for the keys");
        for_message(stretches(wire), wire,
                    [&](size_t row, size_t byte, size_t dim) { write_row(rows + places_[row], dim, wire, message + byte); });
    }

    // For each unique row the sum of what the members sent, divided by `divisor`; `node` members in a row are a node.
    void sum(const std::byte* message, size_t size, Wire wire, size_t node, float divisor, float* out, size_t room) const {
        const auto all = stretches(wire);
        if (room < starts.back() || size != bytes_of(all, wire))
            throw std::invalid_argument("the gradients have another size");
        constexpr size_t kBlock = 256;
        std::vector<std::pair<size_t, size_t>> blocks;  // table, first unique row
        for (size_t t = 0; t < dims_.size(); ++t)
            for (size_t u = 0; u < unique[t].count; u += kBlock) blocks.push_back({t, u});
        parallel_for(blocks.size(), [&](size_t b) {  // each unique row is one thread's
            const auto [t, first] = blocks[b];
            const Unique& table = unique[t];
            const size_t dim = dims_[t], bytes = wire_bytes(dim, wire);
            std::vector<float> scratch(2 * dim);
            for (size_t u = first; u < std::min(table.count, first + kBlock); ++u) {
                float* total = out + starts[t] + u * dim;
                const auto begin = static_cast<size_t>(table.starts[u]), end = static_cast<size_t>(table.starts[u + 1]);
                sum_one(t, begin, end, node, total, scratch.data(), [&](size_t row, size_t member, float* to) {
                    const Stretch& s = all[member * dims_.size() + t];
                    read_row(message + s.byte + (row - s.first) * bytes, dim, wire, to);
                });
                if (divisor != 1)
                    for (size_t j = 0; j < dim; ++j) total[j] /= divisor;
            }
        }, 1 + places_.size() / 2048);
    }

    std::vector<Unique> unique;   // of each table
    std::vector<size_t> starts;   // where each table's unique rows begin in a flat array

private:
    struct Row {
        size_t row;  // in the message
        uint32_t member;
    };

    std::vector<Stretch> stretches(Wire wire) const { return stretches_of(counts_.data(), members_, dims_, wire); }

    // The sum over a unique row's places in the messages, node by node; scratch has room for two rows.
    template <class Read>
    void sum_one(size_t t, size_t begin, size_t end, size_t node, float* total, float* scratch, Read read) const {
        const size_t dim = dims_[t];
        float *of_node = scratch, *next = scratch + dim;
        const auto row_at = [&](size_t at) { return rows_[t][static_cast<size_t>(unique[t].order[at])]; };
        for (size_t at = begin; at < end;) {
            const size_t here = row_at(at).member / node;
            float* into = at == begin ? total : of_node;
            read(row_at(at).row, row_at(at).member, into);
            size_t more = at + 1;
            for (; more < end && row_at(more).member / node == here; ++more) {
                read(row_at(more).row, row_at(more).member, next);
                for (size_t j = 0; j < dim; ++j) into[j] += next[j];
            }
            if (at != begin)
                for (size_t j = 0; j < dim; ++j) total[j] += into[j];
            at = more;
        }
    }

    std::vector<int64_t> counts_;
    std::vector<size_t> dims_;
    size_t members_ = 0;
    std::vector<std::vector<Row>> rows_;  // of each table, in the order of its keys
    std::vector<size_t> places_;          // of each row of the message: where its unique row lies
};

}  // namespace hotrow
