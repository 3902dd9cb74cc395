// Lists of keys as windows into a longer array, which may overlap: finding them when a data set is written, taking the
// ones of a batch when it is read. Window i is values[begins[i] .. begins[i] + lengths[i]); rows come in ranges, each a
// piece of one session. Nothing here runs in parallel: the reader's threads each call it on memory of their own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <vector>

namespace hotrow {

// Keys, each with the bits of its weight where there are weights: equal means equal to the bit.
struct Weighted {
    const int64_t* keys;
    const uint32_t* weights;  // null: no weights

    bool same(size_t a, size_t b) const { return keys[a] == keys[b] && (!weights || weights[a] == weights[b]); }
    bool same(size_t a, const Weighted& other, size_t b, size_t n) const {
        return n == 0 || (std::memcmp(keys + a, other.keys + b, n * sizeof *keys) == 0 &&
                          (!weights || std::memcmp(weights + a, other.weights + b, n * sizeof *weights) == 0));
    }
};

// Sets changed[i] where list i, which ends at offsets[i + 1], differs from the one before it; leaves the others as they are.
inline void mark_changed(const Weighted& lists, const int64_t* offsets, size_t n, bool* changed) {
    for (size_t i = 1; i < n; ++i) {
        const int64_t length = offsets[i + 1] - offsets[i];
        changed[i] = changed[i] || length != offsets[i] - offsets[i - 1] ||
                     !lists.same(offsets[i], lists, offsets[i - 1], length);
    }
}

// Lays lists along each other: a list that begins with the end of what its session has laid down so far only adds the
// rest of itself. Longest overlap by Knuth, Morris and Pratt, so a list costs its length however it repeats within itself.
class Sliding {
public:
    std::vector<int64_t> keys;
    std::vector<uint32_t> weights;
    std::vector<int64_t> begins, lengths;

    void add(const Weighted& lists, size_t at, size_t length, bool new_session) {
        if (new_session) session_ = last_begin_ = keys.size(), last_length_ = 0;
        const Weighted laid{keys.data(), lists.weights ? weights.data() : nullptr};
        size_t begin = last_begin_;
        if (length > last_length_ || !laid.same(last_begin_, lists, at, length)) {  // not just the one before, cut at its end
            const size_t overlap = longest_overlap(lists, at, length);
            begin = keys.size() - overlap;
            keys.insert(keys.end(), lists.keys + at + overlap, lists.keys + at + length);
            if (lists.weights) weights.insert(weights.end(), lists.weights + at + overlap, lists.weights + at + length);
        }
        begins.push_back(static_cast<int64_t>(begin));
        lengths.push_back(static_cast<int64_t>(length));
        last_begin_ = begin;
        last_length_ = length;
    }

private:
    size_t session_ = 0, last_begin_ = 0, last_length_ = 0;
    std::vector<size_t> fallback_;

    // How many of the list's first keys are the last ones laid down in this session.
    size_t longest_overlap(const Weighted& lists, size_t at, size_t length) {
        const size_t tail = std::min(length, keys.size() - session_);
        if (tail == 0) return 0;
        fallback_.assign(length, 0);
        for (size_t i = 1, k = 0; i < length; ++i) {
            while (k > 0 && !lists.same(at + i, at + k)) k = fallback_[k - 1];
            if (lists.same(at + i, at + k)) ++k;
            fallback_[i] = k;
        }
        const auto fits = [&](size_t key, size_t i) {
            return keys[key] == lists.keys[at + i] && (!lists.weights || weights[key] == lists.weights[at + i]);
        };
        size_t k = 0;
        for (size_t key = keys.size() - tail; key < keys.size(); ++key) {
            while (k > 0 && !fits(key, k)) k = fallback_[k - 1];
            if (fits(key, k)) ++k;  // k stays below length before this: at most `tail` keys are looked at
        }
        return k;
    }
};

// Rows in ranges: counts[r] rows from starts[r] on.
struct Ranges {
    const int64_t *starts, *counts;
    size_t n;

    // Their number, after seeing that none leaves an array of `rows`.
    size_t rows_within(size_t rows) const {
        size_t total = 0;
        for (size_t r = 0; r < n; ++r) {
            if (starts[r] < 0 || counts[r] < 0 || static_cast<size_t>(starts[r]) > rows ||
                static_cast<size_t>(counts[r]) > rows - static_cast<size_t>(starts[r]))
                throw std::invalid_argument("a range of rows is outside the array");
            total += static_cast<size_t>(counts[r]);
        }
        return total;
    }
};

// out[i * stride] = from[row i], or from[index[row i]] where there is an index; `size` is that of `from`.
template <class T>
void take(const T* from, size_t size, const int64_t* index, const Ranges& ranges, T* out, size_t stride) {
    for (size_t r = 0; r < ranges.n; ++r) {
        const int64_t first = ranges.starts[r], last = first + ranges.counts[r];
        if (!index && stride == 1) {
            out = std::copy(from + first, from + last, out);
        } else if (!index) {
            for (int64_t i = first; i < last; ++i, out += stride) *out = from[i];
        } else {
            for (int64_t i = first; i < last; ++i, out += stride) {
                if (static_cast<uint64_t>(index[i]) >= size) throw std::invalid_argument("an index is outside the array");
                *out = from[index[i]];
            }
        }
    }
}

// The inverse of the taken samples, counted from 0, and the ranges of a group's rows that they use. Each range of samples
// uses the rows from its first sample's to its last one's, since rows stand in the order of first use.
inline void take_inverse(const int64_t* inverse, const Ranges& samples, int64_t* out, int64_t* row_starts, int64_t* row_counts) {
    int64_t base = 0;
    for (size_t r = 0; r < samples.n; ++r) {
        const int64_t first = samples.starts[r], count = samples.counts[r];
        const int64_t row = count ? inverse[first] : 0;
        const int64_t rows = count ? inverse[first + count - 1] - row + 1 : 0;
        for (int64_t i = 0; i < count; ++i, ++out) {
            const int64_t at = inverse[first + i] - row;
            if (at < 0 || at >= rows) throw std::invalid_argument("an inverse is not in the order of first use");
            *out = at + base;
        }
        row_starts[r] = row;
        row_counts[r] = rows;
        base += rows;
    }
}

// The lists of a feature: one key a row where `begins` is null.
struct BagColumn {
    const int64_t* values;
    const float* weights;
    const int64_t *begins, *lengths;
    bool slides;
    size_t size;  // of values

    bool fits(size_t row) const {
        return begins[row] >= 0 && lengths[row] >= 0 && static_cast<size_t>(begins[row]) <= size &&
               static_cast<size_t>(lengths[row]) <= size - static_cast<size_t>(begins[row]);
    }
};

// A group's bags, feature after feature, as a batch holds them; what is used of each array is said beside it.
struct Bags {
    std::unique_ptr<int64_t[]> values, begins, lengths;
    std::unique_ptr<float[]> weights;
    std::vector<size_t> starts;  // where in `values` each feature begins, and the end

    Bags(const std::vector<BagColumn>& columns, const Ranges& rows, size_t count) {
        size_t room = 0;
        bool weighted = false;
        for (const BagColumn& c : columns) {
            room += most(c, rows, count);
            weighted = weighted || c.weights;
        }
        values = std::make_unique_for_overwrite<int64_t[]>(room);
        if (weighted) weights = std::make_unique_for_overwrite<float[]>(room);
        begins = std::make_unique_for_overwrite<int64_t[]>(columns.size() * count);
        lengths = std::make_unique_for_overwrite<int64_t[]>(columns.size() * count);
        int64_t *begin = begins.get(), *length = lengths.get();
        for (const BagColumn& c : columns) {
            starts.push_back(used_);
            for (size_t r = 0; r < rows.n; ++r) {
                const auto first = static_cast<size_t>(rows.starts[r]), n = static_cast<size_t>(rows.counts[r]);
                if (!c.begins)
                    add_keys(c, first, n, begin, length);
                else if (c.slides)
                    add_windows(c, first, n, begin, length);
                else
                    add_lists(c, first, n, begin, length);
                begin += n;
                length += n;
            }
        }
        starts.push_back(used_);
    }

private:
    size_t used_ = 0;
    std::vector<int32_t> covered_;

    struct Span {
        int64_t first, last;
        bool whole;  // the windows cover all between, as they do unless a session's beginning is missing
    };

    static Span span_of(const BagColumn& c, size_t first, size_t n) {
        Span span{0, 0, true};
        for (size_t i = first; i < first + n; ++i) {
            if (c.lengths[i] == 0) continue;
            const int64_t a = c.begins[i], b = a + c.lengths[i];
            if (span.last == span.first) span = {a, a, true};
            span.whole = span.whole && a >= span.first && a <= span.last;
            span.first = std::min(span.first, a);
            span.last = std::max(span.last, b);
        }
        return span;
    }

    static size_t most(const BagColumn& c, const Ranges& rows, size_t count) {
        if (!c.begins) return count;
        size_t room = 0;
        for (size_t r = 0; r < rows.n; ++r) {
            const auto first = static_cast<size_t>(rows.starts[r]), n = static_cast<size_t>(rows.counts[r]);
            for (size_t i = first; i < first + n; ++i)
                if (!c.fits(i)) throw std::invalid_argument("a list is outside the keys");
            if (c.slides) {
                const Span span = span_of(c, first, n);
                room += static_cast<size_t>(span.last - span.first);
            } else {
                for (size_t i = first; i < first + n; ++i) room += static_cast<size_t>(c.lengths[i]);
            }
        }
        return room;
    }

    void copy(const BagColumn& c, int64_t from, int64_t n) {
        std::copy_n(c.values + from, n, values.get() + used_);
        if (c.weights) std::copy_n(c.weights + from, n, weights.get() + used_);
        used_ += static_cast<size_t>(n);
    }

    void add_keys(const BagColumn& c, size_t first, size_t n, int64_t* begin, int64_t* length) {
        for (size_t i = 0; i < n; ++i) {
            begin[i] = static_cast<int64_t>(used_ + i);
            length[i] = 1;
        }
        copy(c, static_cast<int64_t>(first), static_cast<int64_t>(n));
    }

    void add_lists(const BagColumn& c, size_t first, size_t n, int64_t* begin, int64_t* length) {
        for (size_t i = 0; i < n; ++i) {
            begin[i] = static_cast<int64_t>(used_);
            length[i] = c.lengths[first + i];
            copy(c, c.begins[first + i], length[i]);
        }
    }

    // Copies what the windows cover, and nothing between them: a key that no sample uses must not be looked up.
    void add_windows(const BagColumn& c, size_t first, size_t n, int64_t* begin, int64_t* length) {
        const Span span = span_of(c, first, n);
        std::copy_n(c.lengths + first, n, length);
        const auto base = static_cast<int64_t>(used_);
        if (span.whole) {
            for (size_t i = 0; i < n; ++i) begin[i] = length[i] ? base + c.begins[first + i] - span.first : base;
            copy(c, span.first, span.last - span.first);
            return;
        }
        covered_.assign(static_cast<size_t>(span.last - span.first) + 1, 0);
        for (size_t i = 0; i < n; ++i) {
            if (length[i] == 0) continue;
            const int64_t a = c.begins[first + i] - span.first;
            ++covered_[static_cast<size_t>(a)];
            --covered_[static_cast<size_t>(a + length[i])];
        }
        int32_t open = 0;
        for (int64_t at = span.first; at < span.last; ++at) {  // covered_ becomes the place of each key
            int32_t& here = covered_[static_cast<size_t>(at - span.first)];
            open += here;
            here = static_cast<int32_t>(static_cast<int64_t>(used_) - base);
            if (open) copy(c, at, 1);
        }
        for (size_t i = 0; i < n; ++i)
            begin[i] = length[i] ? base + covered_[static_cast<size_t>(c.begins[first + i] - span.first)] : base;
    }
};

}  // namespace hotrow
