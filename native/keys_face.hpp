// The Python face of key maps, key counts and keys in flight.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <algorithm>

#include "arrays.hpp"
#include "counts.hpp"
#include "inflight.hpp"
#include "keymap.hpp"

namespace hotrow {

inline void bind_keymap(nb::module_& m) {
    nb::class_<KeyMap>(m, "KeyMap")
        .def("__init__",
             [](KeyMap* self, const In<int64_t>& keys) {
                 nb::gil_scoped_release release;
                 new (self) KeyMap(keys.data(), keys.size());
             })
        .def("__len__", &KeyMap::size)
        .def_prop_ro("keys", [](nb::handle self) {
            const auto& keys = nb::cast<const KeyMap&>(self).keys();
            return view(keys.data(), keys.size(), self);
        })
        .def("find", [](const KeyMap& map, const In<int64_t>& keys) {
            std::vector<int32_t> out(keys.size());
            {
                nb::gil_scoped_release release;
                map.find(keys.data(), keys.size(), out.data());
            }
            return give(std::move(out));
        });
}

inline void bind_counts(nb::module_& m) {
    m.def("hash_keys", [](const In<int64_t>& keys) {
        std::vector<uint64_t> out(keys.size());
        {
            nb::gil_scoped_release release;
            std::transform(keys.data(), keys.data() + keys.size(), out.begin(), hash_key);
        }
        return give(std::move(out));
    });
    nb::class_<Counts>(m, "Counts")
        .def(nb::init<size_t>(), nb::arg("limit"))
        .def("add",
             [](Counts& c, const In<int64_t>& keys, const std::optional<In<int64_t>>& times) {
                 if (times && times->size() != keys.size()) throw std::invalid_argument("each key needs its times");
                 nb::gil_scoped_release release;
                 c.add(keys.data(), times ? times->data() : nullptr, keys.size());
             },
             nb::arg("keys"), nb::arg("times").none() = nb::none())
        .def("merge",
             [](Counts& c, const In<int64_t>& keys, const In<int64_t>& counts, int64_t total, int64_t error,
                const In<uint8_t>& registers) {
                 const size_t size = registers.size();
                 if (counts.size() != keys.size() || (size != 0 && size != size_t{1} << Counts::kRegisterBits))
                     throw std::invalid_argument("keys, counters and registers do not fit together");
                 nb::gil_scoped_release release;
                 c.merge(keys.data(), counts.data(), keys.size(), total, error, size == 0 ? nullptr : registers.data());
             })
        .def("of",
             [](const Counts& c, const In<int64_t>& keys) {
                 std::vector<int64_t> out(keys.size());
                 {
                     nb::gil_scoped_release release;
                     c.of(keys.data(), keys.size(), out.data());
                 }
                 return give(std::move(out));
             })
        .def("above",
             [](const Counts& c, int64_t least) {
                 std::pair<std::vector<int64_t>, std::vector<int64_t>> found;
                 {
                     nb::gil_scoped_release release;
                     found = c.above(least);
                 }
                 return nb::make_tuple(give(std::move(found.first)), give(std::move(found.second)));
             })
        .def("classes",
             [](const Counts& c) {
                 CountClasses found;
                 {
                     nb::gil_scoped_release release;
                     found = c.classes();
                 }
                 return nb::make_tuple(give(std::move(found.counts)), give(std::move(found.keys)));
             })
        .def("registers", [](const Counts& c) { return give(c.registers()); })
        .def_prop_ro("limit", &Counts::limit)
        .def_prop_ro("used", &Counts::used)
        .def_prop_ro("exact", &Counts::exact)
        .def_prop_ro("bytes", &Counts::bytes)
        .def_prop_ro("total", &Counts::total)
        .def_prop_ro("error", &Counts::error);
}

inline void bind_inflight(nb::module_& m) {
    nb::class_<InFlight>(m, "InFlight")
        .def(nb::init<>())
        .def("__len__", &InFlight::size)
        .def("enter",
             [](InFlight& self, const In<int64_t>& keys, uint64_t batch, const Out<int64_t>& found) {
                 if (found.size() < InFlight::kMost) throw std::invalid_argument("there is no room for the counts");
                 nb::gil_scoped_release release;
                 self.enter(keys.data(), keys.size(), batch, found.data());
             })
        .def("leave",
             [](InFlight& self, const In<int64_t>& keys, uint64_t batch) {
                 nb::gil_scoped_release release;
                 self.leave(keys.data(), keys.size(), batch);
             })
        .def("shared",
             [](const InFlight& self, const In<int64_t>& keys, uint64_t first, uint64_t last, bool without) {
                 std::vector<int64_t> out;
                 {
                     nb::gil_scoped_release release;
                     out = self.shared(keys.data(), keys.size(), first, last, without);
                 }
                 return give(std::move(out));
             },
             nb::arg("keys"), nb::arg("first"), nb::arg("last"), nb::arg("without") = false);
}

}  // namespace hotrow
