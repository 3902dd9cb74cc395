// The Python face of windows.hpp: what src/hotrow/data writes and reads data sets by.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "windows.hpp"

namespace hotrow {

using MaybeInts = std::optional<In<int64_t>>;
using ListArrays = std::tuple<In<int64_t>, std::optional<In<float>>, MaybeInts, MaybeInts, bool>;

inline Ranges ranges_of(const In<int64_t>& starts, const In<int64_t>& counts) {
    if (starts.size() != counts.size()) throw std::invalid_argument("each range needs a start and a count");
    return {starts.data(), counts.data(), starts.size()};
}

inline Weighted weighted(const In<int64_t>& keys, const std::optional<In<float>>& weights) {
    if (weights && weights->size() != keys.size()) throw std::invalid_argument("each key needs a weight");
    return {keys.data(), weights ? reinterpret_cast<const uint32_t*>(weights->data()) : nullptr};
}

inline void check_offsets(const In<int64_t>& offsets, size_t values) {
    int64_t before = 0;
    for (size_t i = 0; i < offsets.size(); ++i) {
        if (offsets.data()[i] < before) throw std::invalid_argument("offsets decrease");
        before = offsets.data()[i];
    }
    if (static_cast<size_t>(before) > values) throw std::invalid_argument("offsets leave the keys");
}

inline nb::object slide(const In<int64_t>& keys, const std::optional<In<float>>& weights, const In<int64_t>& offsets,
                 const In<int64_t>& rows, const In<bool>& new_session) {
    const Weighted lists = weighted(keys, weights);
    check_offsets(offsets, keys.size());
    if (rows.size() != new_session.size()) throw std::invalid_argument("each row needs to know its session's beginning");
    Sliding sliding;
    {
        nb::gil_scoped_release release;
        for (size_t i = 0; i < rows.size(); ++i) {
            const auto row = static_cast<size_t>(rows.data()[i]);
            if (row + 1 >= offsets.size()) throw std::invalid_argument("a row is outside the lists");
            const int64_t *at = offsets.data() + row;
            sliding.add(lists, static_cast<size_t>(at[0]), static_cast<size_t>(at[1] - at[0]), new_session.data()[i]);
        }
    }
    std::vector<float> laid(sliding.weights.size());
    if (!laid.empty()) std::memcpy(laid.data(), sliding.weights.data(), laid.size() * sizeof(float));
    return nb::make_tuple(give(std::move(sliding.keys)), give(std::move(laid)), give(std::move(sliding.begins)),
                          give(std::move(sliding.lengths)));
}

template <class T>
nb::object take_column(const In<T>& from, const MaybeInts& index, const In<int64_t>& starts, const In<int64_t>& counts) {
    const Ranges ranges = ranges_of(starts, counts);
    const size_t n = ranges.rows_within(index ? index->size() : from.size());
    auto out = std::make_unique_for_overwrite<T[]>(n);
    {
        nb::gil_scoped_release release;
        take(from.data(), from.size(), index ? index->data() : nullptr, ranges, out.get(), 1);
    }
    return nb::cast(give(std::move(out), n));
}

inline void take_matrix(const std::vector<std::pair<In<float>, MaybeInts>>& columns, const In<int64_t>& starts,
                 const In<int64_t>& counts, const OutMatrix& out) {
    const Ranges ranges = ranges_of(starts, counts);
    if (out.shape(1) != columns.size()) throw std::invalid_argument("each column needs its place");
    for (const auto& [from, index] : columns)
        if (ranges.rows_within(index ? index->size() : from.size()) != out.shape(0))
            throw std::invalid_argument("each row needs its place");
    nb::gil_scoped_release release;
    for (size_t j = 0; j < columns.size(); ++j) {
        const auto& [from, index] = columns[j];
        take(from.data(), from.size(), index ? index->data() : nullptr, ranges, out.data() + j, columns.size());
    }
}

inline nb::object take_inverse_of(const In<int64_t>& inverse, const In<int64_t>& starts, const In<int64_t>& counts) {
    const Ranges samples = ranges_of(starts, counts);
    const size_t n = samples.rows_within(inverse.size());
    auto out = std::make_unique_for_overwrite<int64_t[]>(n);
    auto row_starts = std::make_unique_for_overwrite<int64_t[]>(samples.n);
    auto row_counts = std::make_unique_for_overwrite<int64_t[]>(samples.n);
    {
        nb::gil_scoped_release release;
        take_inverse(inverse.data(), samples, out.get(), row_starts.get(), row_counts.get());
    }
    return nb::make_tuple(give(std::move(out), n), give(std::move(row_starts), samples.n), give(std::move(row_counts), samples.n));
}

inline nb::object take_bags(const std::vector<ListArrays>& arrays, const In<int64_t>& starts, const In<int64_t>& counts) {
    const Ranges rows = ranges_of(starts, counts);
    std::vector<BagColumn> columns;
    size_t n = 0;
    for (const auto& [values, weights, begins, lengths, slides] : arrays) {
        if (weights && weights->size() != values.size()) throw std::invalid_argument("each key needs a weight");
        if (begins.has_value() != lengths.has_value() || (begins && begins->size() != lengths->size()))
            throw std::invalid_argument("each list needs its begin and its length");
        columns.push_back({values.data(), weights ? weights->data() : nullptr, begins ? begins->data() : nullptr,
                           lengths ? lengths->data() : nullptr, slides, values.size()});
        n = rows.rows_within(begins ? begins->size() : values.size());
    }
    std::optional<Bags> bags;
    {
        nb::gil_scoped_release release;
        bags.emplace(columns, rows, n);
    }
    const size_t used = bags->starts.back(), lists = columns.size() * n;
    nb::object weights = nb::none();
    if (bags->weights) weights = nb::cast(give(std::move(bags->weights), used));
    return nb::make_tuple(give(std::move(bags->values), used), weights, give(std::move(bags->begins), lists),
                          give(std::move(bags->lengths), lists), bags->starts);
}

inline void bind_windows(nb::module_& m) {
    m.def("mark_changed",
          [](const In<int64_t>& keys, const std::optional<In<float>>& weights, const In<int64_t>& offsets, const Out<bool>& changed) {
              const Weighted lists = weighted(keys, weights);
              check_offsets(offsets, keys.size());
              if (offsets.size() != changed.size() + 1) throw std::invalid_argument("each list needs an answer");
              nb::gil_scoped_release release;
              mark_changed(lists, offsets.data(), changed.size(), changed.data());
          },
          nb::arg("keys"), nb::arg("weights").none(), nb::arg("offsets"), nb::arg("changed").noconvert());
    m.def("slide", &slide, nb::arg("keys"), nb::arg("weights").none(), nb::arg("offsets"), nb::arg("rows"),
          nb::arg("new_session"));
    m.def("take", &take_column<int64_t>, nb::arg("column").noconvert(), nb::arg("index").none(), nb::arg("starts"), nb::arg("counts"));
    m.def("take", &take_column<float>, nb::arg("column").noconvert(), nb::arg("index").none(), nb::arg("starts"), nb::arg("counts"));
    m.def("take_matrix", &take_matrix, nb::arg("columns"), nb::arg("starts"), nb::arg("counts"), nb::arg("out").noconvert());
    m.def("take_inverse", &take_inverse_of, nb::arg("inverse"), nb::arg("starts"), nb::arg("counts"));
    m.def("take_bags", &take_bags, nb::arg("columns"), nb::arg("starts"), nb::arg("counts"));
}

}  // namespace hotrow
