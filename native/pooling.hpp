// From rows to what a model sees, and back: pooled features side by side, sequence features row for row.
//
// The rows of all tables lie in one flat array, table after table: rows[U_0 * D_0 + ...]. A group's pooled features go to
// one matrix [S, sum of dims]; a sequence feature goes to a matrix [lookups, D] of its own. On the way back the
// gradient of a row is summed by one thread, over its lookups in their order, straight from the matrices' gradients.
//
// Bags may be windows that overlap (stretches.hpp). A stored key is then hashed once however many windows it lies in. A sequence
// has one row for each stored key, which all its windows share; for a pooled feature lookups are laid out per window.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "grouping.hpp"
#include "rows.hpp"
#include "stretches.hpp"

namespace hotrow {

enum class Pooling : int { sum = 0, mean = 1, sequence = 2 };

constexpr size_t kNoTable = static_cast<size_t>(-1);  // a feature that nobody looks up

struct FeatureSpec {
    size_t table;
    Pooling pooling;
};

struct GroupInput {
    const int64_t* values;
    const int64_t* offsets;
    const float* weights;   // may be null
    const int64_t* begins;  // of windows; null: bags stand one after another
    size_t samples;         // unique ones
};

// A feature of this batch: where its lookups stand among its table's and where its result goes.
struct FeatureView {
    size_t table, dim;
    Pooling pooling;
    const int64_t* values;   // the group's
    const int64_t* offsets;  // [samples + 1], into the group's values
    const float* weights;    // the group's; may be null
    size_t samples;
    size_t group;
    size_t at;      // its first lookup among the table's
    size_t matrix;  // which result matrix
    size_t column;  // and where in a row of it
    const int64_t* begins;  // [samples], into the group's values; null: no windows
    std::unique_ptr<const Stretches> stretches = nullptr;  // what the windows lie in, where there are some
    bool one_each = false;  // whether every sample has exactly one key

    size_t bag_keys() const { return static_cast<size_t>(offsets[samples] - offsets[0]); }
    bool shares_rows() const { return stretches != nullptr && pooling == Pooling::sequence; }
    size_t lookups() const { return shares_rows() ? stretches->stored : bag_keys(); }

    // The keys to hash.
    const int64_t* keys() const { return stretches != nullptr ? stretches->keys : values + offsets[0]; }
    size_t hashed() const { return stretches != nullptr ? stretches->stored : bag_keys(); }

    // The weight of the key at p of the offsets, in the bag of sample s.
    float weight(size_t s, int64_t p) const {
        if (weights == nullptr) return 1.0f;
        return weights[begins == nullptr ? p : begins[s] + (p - offsets[s])];
    }

    // Whether these samples have exactly one key each.
    bool regular(size_t first, size_t last) const {
        int64_t others = 0;
        for (size_t s = first; s < last; ++s) others |= (offsets[s + 1] - offsets[s]) ^ 1;
        return others == 0;
    }
};

struct Matrix {
    float* data;
    size_t width, rows;
};

inline void copy(float* __restrict out, const float* __restrict row, float w, size_t dim) {
    if (w == 1.0f)
        copy_floats(out, row, dim);
    else
        for (size_t j = 0; j < dim; ++j) out[j] = w * row[j];
}

inline void add(float* __restrict out, const float* __restrict row, float w, size_t dim) {
    if (w == 1.0f)
        for (size_t j = 0; j < dim; ++j) out[j] += row[j];
    else
        for (size_t j = 0; j < dim; ++j) out[j] += w * row[j];
}

inline void prefetch(const float* row, size_t dim) {
    const auto* bytes = reinterpret_cast<const char*>(row);
    const size_t last = std::min<size_t>(dim * sizeof(float), 256) - 1;
    for (size_t at = 0; at < last; at += 64) __builtin_prefetch(bytes + at);
}

// For each lookup of a table where its gradient stands, and what it is multiplied by where that is not always 1.
struct Addresses {
    struct Table {
        const float* base = nullptr;  // if lookups stand at equal distances: where, and how far apart
        size_t distance = 0;
        Buffer<const float*> places;
        Buffer<float> factors;  // empty: always 1

        const float* place(size_t lookup) const { return base != nullptr ? base + lookup * distance : places[lookup]; }
        float factor(size_t lookup) const { return factors.size() == 0 ? 1.0f : factors[lookup]; }
    };
    std::vector<Table> tables;
};

class Grouping {
public:
    Grouping(std::vector<size_t> dims, const std::vector<std::vector<FeatureSpec>>& groups,
             const std::vector<GroupInput>& inputs)
        : dims_(std::move(dims)) {
        lay_out(groups, inputs);
        std::vector<std::vector<std::pair<const int64_t*, size_t>>> segments(dims_.size());
        for (const FeatureView& f : features_) segments[f.table].push_back({f.keys(), f.hashed()});
        std::vector<std::vector<int64_t>> joined(dims_.size());
        std::vector<std::pair<const int64_t*, size_t>> sets;
        for (size_t t = 0; t < dims_.size(); ++t) {
            if (segments[t].size() == 1) {
                sets.push_back(segments[t][0]);
                continue;
            }
            for (const auto& [keys, n] : segments[t]) joined[t].insert(joined[t].end(), keys, keys + n);
            sets.push_back({joined[t].data(), joined[t].size()});
        }
        tables = dedup_all(sets);
        lay_out_windows();
        row_starts.assign(1, 0);
        for (size_t t = 0; t < dims_.size(); ++t) row_starts.push_back(row_starts[t] + tables[t].count * dims_[t]);
    }

    std::vector<Unique> tables;
    std::vector<size_t> row_starts;  // where each table's rows begin in the flat array, and where the last end

    size_t dim(size_t table) const { return dims_[table]; }

    // Where the lookups of every table stand in these matrices.
    Addresses addresses(const std::vector<Matrix>& matrices) const {
        Addresses out;
        out.tables.resize(tables.size());
        std::vector<const FeatureView*> only(tables.size(), nullptr);
        std::vector<size_t> features(tables.size(), 0);
        std::vector<bool> scaled(tables.size());
        for (const FeatureView& f : features_) {
            only[f.table] = &f;
            ++features[f.table];
            if (f.weights != nullptr || f.pooling == Pooling::mean) scaled[f.table] = true;
        }
        for (size_t t = 0; t < tables.size(); ++t) {
            if (features[t] == 1 && !scaled[t] && (only[t]->pooling == Pooling::sequence || only[t]->one_each)) {
                out.tables[t].base = matrices[only[t]->matrix].data + only[t]->column;
                out.tables[t].distance = matrices[only[t]->matrix].width;
                continue;
            }
            out.tables[t].places = Buffer<const float*>(tables[t].lookups);
            if (scaled[t]) out.tables[t].factors = Buffer<float>(tables[t].lookups);
        }
        for_blocks([&](const FeatureView& f, size_t first, size_t last) {
            Addresses::Table& to = out.tables[f.table];
            if (to.base != nullptr) return;
            const Matrix& m = matrices[f.matrix];
            if (f.pooling == Pooling::sequence) {
                for (size_t at = row_of(f, first); at < row_of(f, last); ++at) {
                    to.places[f.at + at] = m.data + at * m.width;
                    if (to.factors.size() != 0) to.factors[f.at + at] = 1.0f;
                }
                return;
            }
            for (size_t s = first; s < last; ++s) {
                const float share = mean_factor(f, s);
                for (int64_t p = f.offsets[s]; p < f.offsets[s + 1]; ++p) {
                    const size_t at = f.at + static_cast<size_t>(p - f.offsets[0]);
                    to.places[at] = m.data + s * m.width + f.column;
                    if (to.factors.size() != 0) to.factors[at] = f.weight(s, p) * share;
                }
            }
        });
        return out;
    }

    void forward(const float* rows, const std::vector<Matrix>& out) const {
        std::vector<const float*> of_table(tables.size());
        for (size_t t = 0; t < tables.size(); ++t) of_table[t] = rows + row_starts[t];
        forward(of_table, out);
    }

    // The same with each table's rows in a place of their own. Features of tables that have none are left as they are.
    void forward(const std::vector<const float*>& of_table, const std::vector<Matrix>& out) const {
        for_blocks([&](const FeatureView& f, size_t first, size_t last) {
            if (of_table[f.table] != nullptr) pool_samples(f, first, last, of_table[f.table], out[f.matrix]);
        });
    }

    // The results of one table's features, all in this thread.
    void pool_table(size_t t, const float* rows, const std::vector<Matrix>& out) const {
        for (size_t k = feature_starts_[t]; k < feature_starts_[t + 1]; ++k) {
            const FeatureView& f = features_[features_of_tables_[k]];
            pool_samples(f, 0, f.samples, rows, out[f.matrix]);
        }
    }

    // The gradient of every row, in the flat array; grads[m] is the gradient of the result matrix m.
    void backward(const std::vector<Matrix>& grads, float* row_grads) const {
        const Addresses from = addresses(grads);
        for_ranges([&](size_t t, size_t first, size_t last) {
            for (size_t u = first; u < last; ++u) {
                float* to = row_grads + row_starts[t] + u * dims_[t];
                if (const float* sum = sum_gradient(from, t, u, to, dims_[t]); sum != to) copy_floats(to, sum, dims_[t]);
            }
        });
    }

    // The gradient of one row: the sum over its lookups, in their order, in `to`; or where it stands, if there is one.
    const float* sum_gradient(const Addresses& from, size_t t, size_t u, float* to, size_t dim) const {
        constexpr int32_t kAhead = 12;  // gradients stand far apart: ask for them early
        const Unique& unique = tables[t];
        const Addresses::Table& table = from.tables[t];
        const auto lookups = static_cast<int32_t>(unique.lookups);
        const int32_t begin = unique.starts[u], end = unique.starts[u + 1];
        for (int32_t k = begin; k < end; ++k) {
            const auto p = static_cast<size_t>(unique.order[k]);
            if (k + kAhead < lookups) prefetch(table.place(static_cast<size_t>(unique.order[k + kAhead])), dim);
            if (end - begin == 1 && table.factor(p) == 1.0f) return table.place(p);
            k == begin ? copy(to, table.place(p), table.factor(p), dim) : add(to, table.place(p), table.factor(p), dim);
        }
        return to;
    }

    // Refuses matrices that are not of this batch's shapes.
    void check(const std::vector<Matrix>& matrices) const {
        for (const FeatureView& f : features_) {
            const size_t rows = f.pooling == Pooling::sequence ? f.lookups() : f.samples;
            if (f.matrix >= matrices.size() || matrices[f.matrix].rows != rows ||
                matrices[f.matrix].width < f.column + f.dim)
                throw std::invalid_argument("the result matrices do not have the shapes of this batch");
        }
    }

    // How many lookups all features have together.
    size_t lookups() const {
        size_t total = 0;
        for (const FeatureView& f : features_) total += f.lookups();
        return total;
    }

    // From a number of each unique key to that of each lookup: the pooled features in the order of the batch's groups, then
    // the sequences. Features write ranges of their own.
    void spread_numbers(const std::vector<std::vector<int32_t>>& of_table, int32_t* out) const {
        std::vector<std::pair<const FeatureView*, size_t>> ranges;
        size_t begin = 0;
        for (const bool sequences : {false, true})
            for (const FeatureView& f : features_)
                if ((f.pooling == Pooling::sequence) == sequences) {
                    ranges.push_back({&f, begin});
                    begin += f.lookups();
                }
        parallel_for(ranges.size(), [&](size_t k) {
            const auto& [f, at] = ranges[k];
            const int32_t* inverse = tables[f->table].inverse.data() + f->at;
            const int32_t* numbers = of_table[f->table].data();
            for (size_t i = 0; i < f->lookups(); ++i) out[at + i] = numbers[inverse[i]];
        });
    }

    // What the windows of the nth sequence lie in, in the order of the batch's groups; null if it has none.
    const Stretches* stretches_of_sequence(size_t n) const {
        for (const FeatureView& f : features_)
            if (f.pooling == Pooling::sequence && n-- == 0) return f.stretches.get();
        throw std::invalid_argument("there is no such sequence");
    }

private:
    // The results of some samples, from the rows of the feature's table.
    void pool_samples(const FeatureView& f, size_t first, size_t last, const float* rows, const Matrix& m) const {
        if (f.pooling == Pooling::sequence) {
            const size_t begin = row_of(f, first);
            copy_rows(rows, tables[f.table].inverse.data() + f.at + begin, row_of(f, last) - begin, m, begin, 0, f.dim);
            return;
        }
        const int32_t* inverse = tables[f.table].inverse.data() + f.at - f.offsets[0];
        if (f.weights == nullptr && (f.one_each || f.regular(first, last))) {
            copy_rows(rows, inverse + f.offsets[first], last - first, m, first, f.column, f.dim);
            return;
        }
        for (size_t s = first; s < last; ++s) {
            float* to = m.data + s * m.width + f.column;
            const int64_t begin = f.offsets[s], end = f.offsets[s + 1];
            if (begin == end) std::fill_n(to, f.dim, 0.0f);
            const float share = mean_factor(f, s);
            for (int64_t p = begin; p < end; ++p) {
                const float* row = rows + static_cast<size_t>(inverse[p]) * f.dim;
                const float w = f.weight(s, p) * share;
                p == begin ? copy(to, row, w, f.dim) : add(to, row, w, f.dim);
            }
        }
    }

    // rows[which[k]] for each of n, to rows of the matrix from `first` on. They are written far apart: each is asked for
    // early, or not at all.
    static void copy_rows(const float* rows, const int32_t* which, size_t n, const Matrix& m, size_t first, size_t column,
                          size_t row_dim) {
        constexpr size_t kAhead = 16, kLine = 64 / sizeof(float), kLarge = 1 << 18;
        float* out = m.data + first * m.width + column;
        const bool whole_lines = reinterpret_cast<uintptr_t>(out) % 64 == 0 && m.width % kLine == 0 && row_dim % kLine == 0;
        if (kWritesPast && whole_lines && m.rows * m.width >= kLarge) {
            with_dim(row_dim, [&](auto dim) {
                for (size_t k = 0; k < n; ++k) copy_past(out + k * m.width, rows + static_cast<size_t>(which[k]) * dim, dim);
            });
            return written_past();
        }
        with_dim(row_dim, [&](auto dim) {
            for (size_t k = 0; k < n; ++k) {
                if (k + kAhead < n) prefetch(out + (k + kAhead) * m.width, dim);
                copy_floats(out + k * m.width, rows + static_cast<size_t>(which[k]) * dim, dim);
            }
        });
    }

    void lay_out(const std::vector<std::vector<FeatureSpec>>& groups, const std::vector<GroupInput>& inputs) {
        std::vector<size_t> at(dims_.size(), 0);
        size_t matrices = groups.size();  // pooled ones first, one a group; then one for each sequence
        size_t count = 0;
        for (const auto& group : groups) count += group.size();
        features_.reserve(count);
        for (size_t g = 0; g < groups.size(); ++g) {
            size_t column = 0;
            const GroupInput& in = inputs[g];
            for (size_t k = 0; k < groups[g].size(); ++k) {
                const FeatureSpec& spec = groups[g][k];
                if (spec.table == kNoTable) continue;
                FeatureView f{spec.table, dims_[spec.table], spec.pooling, in.values, in.offsets + k * in.samples,
                              in.weights, in.samples, g, at[spec.table], g, 0,
                              in.begins == nullptr ? nullptr : in.begins + k * in.samples};
                if (f.begins != nullptr) f.stretches = std::make_unique<Stretches>(f.values, f.begins, f.offsets, f.samples);
                if (spec.pooling == Pooling::sequence) {
                    f.matrix = matrices++;
                } else {
                    f.column = column;
                    column += f.dim;
                }
                f.one_each = f.regular(0, f.samples);
                at[spec.table] += f.lookups();
                features_.push_back(std::move(f));
            }
        }
        feature_starts_.assign(dims_.size() + 1, 0);
        for (const FeatureView& f : features_) ++feature_starts_[f.table + 1];
        for (size_t t = 0; t < dims_.size(); ++t) feature_starts_[t + 1] += feature_starts_[t];
        auto next = feature_starts_;
        features_of_tables_.resize(features_.size());
        for (size_t k = 0; k < features_.size(); ++k) features_of_tables_[next[features_[k].table]++] = k;
    }

    // From one lookup a stored key to one for each window that has it, for pooled features of windows.
    void lay_out_windows() {
        const auto per_window = [](const FeatureView& f) { return f.stretches != nullptr && !f.shares_rows(); };
        if (std::none_of(features_.begin(), features_.end(), per_window)) return;
        std::vector<std::vector<Spread>> parts(tables.size());
        for (const FeatureView& f : features_)
            parts[f.table].push_back({f.hashed(), f.lookups(), per_window(f) ? f.stretches->begins.data() : nullptr, f.offsets,
                                      f.samples});
        parallel_for(tables.size(), [&](size_t t) {  // each its own table
            if (std::any_of(parts[t].begin(), parts[t].end(), [](const Spread& p) { return p.begins != nullptr; }))
                tables[t] = spread(std::move(tables[t]), parts[t]);
        });
    }

    // Where a block of a sequence's rows begins that goes with the block of samples from s on. Rows that windows share
    // belong to no sample in particular: they are dealt out evenly.
    static size_t row_of(const FeatureView& f, size_t s) {
        if (f.stretches == nullptr) return static_cast<size_t>(f.offsets[s] - f.offsets[0]);
        return f.stretches->stored * s / f.samples;
    }

    // What a mean divides by: the number of keys, or the sum of their weights.
    static float mean_factor(const FeatureView& f, size_t s) {
        const int64_t begin = f.offsets[s], end = f.offsets[s + 1];
        if (f.pooling != Pooling::mean || (f.weights == nullptr && end - begin <= 1)) return 1.0f;
        float total = 0;
        for (int64_t p = begin; p < end; ++p) total += f.weight(s, p);
        return total == 0.0f ? 0.0f : 1.0f / total;
    }

    // body(feature, first sample, last sample), on all cores. A block is a few samples of all features of a group, so that
    // the rows it writes side by side stay in cache; blocks write rows of their own samples only.
    template <class Body>
    void for_blocks(Body body) const {
        constexpr size_t kBlock = 64;
        struct Block {
            size_t first_feature, last_feature, sample;
        };
        std::vector<Block> blocks;
        for (size_t f = 0, next; f < features_.size(); f = next) {
            for (next = f; next < features_.size() && features_[next].group == features_[f].group;) ++next;
            for (size_t s = 0; s < features_[f].samples; s += kBlock) blocks.push_back({f, next, s});
        }
        parallel_for(blocks.size(), [&](size_t b) {
            const size_t first = blocks[b].sample;
            for (size_t f = blocks[b].first_feature; f < blocks[b].last_feature; ++f)
                body(features_[f], first, std::min(features_[f].samples, first + kBlock));
        });
    }

    // body(table, first unique key, last), on all cores, in ranges with about the same number of lookups. A range
    // writes rows of its own unique keys only.
    template <class Body>
    void for_ranges(Body body) const {
        constexpr int32_t kLookups = 2048;
        struct Range {
            size_t table, first, last;
        };
        std::vector<Range> ranges;
        for (size_t t = 0; t < tables.size(); ++t) {
            const int32_t* starts = tables[t].starts.data();
            for (size_t first = 0; first < tables[t].count;) {
                const int32_t* stop = std::upper_bound(starts + first + 1, starts + tables[t].count, starts[first] + kLookups);
                ranges.push_back({t, first, static_cast<size_t>(stop - starts)});
                first = ranges.back().last;
            }
        }
        parallel_for(ranges.size(), [&](size_t r) { body(ranges[r].table, ranges[r].first, ranges[r].last); });
    }

    std::vector<size_t> dims_;
    std::vector<FeatureView> features_;
    std::vector<size_t> features_of_tables_, feature_starts_;  // the features' numbers, table after table; where each begins
};

}  // namespace hotrow
