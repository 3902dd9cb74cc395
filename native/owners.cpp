// The Python face of keys on their way between ranks. A unit of its own: see owners_face.hpp.
#include "owners_face.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "arrays.hpp"
#include "owners.hpp"

namespace hotrow {
namespace {

Wire wire_of(int number) {
    if (number < 0 || number > 2) throw std::invalid_argument("there is no such wire format");
    return static_cast<Wire>(number);
}

using Message = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Received = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::byte* bytes_in(const Message& m, size_t need) {
    if (m.size() != need) throw std::invalid_argument("the message has another size");
    return reinterpret_cast<std::byte*>(m.data());
}

Outgoing* make_outgoing(const std::vector<In<int64_t>>& keys, const std::vector<std::optional<In<int64_t>>>& positions,
                               const std::optional<std::vector<In<int32_t>>>& repeats, const std::vector<size_t>& starts,
                               const std::vector<size_t>& dims, uint32_t ranks, uint32_t divide, uint32_t members) {
    const size_t n = keys.size();
    if (positions.size() != n || starts.size() < n || dims.size() != n || (repeats && repeats->size() != n))
        throw std::invalid_argument("each table needs keys, positions or None, a start and a dim");
    if (ranks == 0 || divide == 0 || members == 0) throw std::invalid_argument("there is nobody to answer");
    std::vector<Asked> tables(n);
    for (size_t t = 0; t < n; ++t) {
        Asked& a = tables[t];
        a.keys = keys[t].data();
        a.n = keys[t].size();
        a.start = starts[t];
        a.dim = dims[t];
        if (dims[t] == 0) throw std::invalid_argument("a row has at least one value");
        if (positions[t]) {
            if (positions[t]->size() != a.n) throw std::invalid_argument("each key needs a position");
            a.positions = positions[t]->data();
            if (std::any_of(a.positions, a.positions + a.n, [](int64_t p) { return p < 0; }))
                throw std::invalid_argument("a position is outside the rows' array");
        }
        if (repeats) {
            if ((*repeats)[t].size() != a.n) throw std::invalid_argument("each key needs its repeats");
            a.repeats = (*repeats)[t].data();
            if (std::any_of(a.repeats, a.repeats + a.n, [](int32_t r) { return r < 1; }))
                throw std::invalid_argument("a key is sent at least once");
        }
    }
    nb::gil_scoped_release release;
    return new Outgoing(tables, Rule{ranks, divide, members});
}

}  // namespace

void bind_owners(nb::module_& m) {
    m.def("owners", [](const In<int64_t>& keys, uint32_t ranks) {
        if (ranks == 0) throw std::invalid_argument("there are no ranks");
        std::vector<int32_t> out(keys.size());
        {
            nb::gil_scoped_release release;
            std::transform(keys.data(), keys.data() + keys.size(), out.begin(),
                           [&](int64_t key) { return static_cast<int32_t>(owner_of(key, ranks)); });
        }
        return give(std::move(out));
    });
    m.def("wire_bytes", [](size_t dim, int wire) { return wire_bytes(dim, wire_of(wire)); });
    nb::class_<Outgoing>(m, "Outgoing")
        .def(nb::new_(&make_outgoing), nb::kw_only(), nb::arg("keys"), nb::arg("positions"), nb::arg("repeats").none(),
             nb::arg("starts"), nb::arg("dims"), nb::arg("ranks"), nb::arg("divide"), nb::arg("members"))
        .def_prop_ro("keys", [](nb::handle self) {
            auto& keys = nb::cast<Outgoing&>(self).keys;
            return view(keys.data(), keys.size(), self);
        })
        .def_prop_ro("counts", [](nb::handle self) {
            auto& counts = nb::cast<Outgoing&>(self).counts;
            return view(counts.data(), counts.size(), self);
        })
        .def("pack", [](const Outgoing& o, const In<float>& from, int wire, const Message& message) {
            const Wire w = wire_of(wire);
            std::byte* to = bytes_in(message, o.bytes(w));
            nb::gil_scoped_release release;
            o.pack(from.data(), from.size(), w, to);
        }, nb::arg("rows"), nb::arg("wire"), nb::arg("message").noconvert())
        .def("unpack", [](const Outgoing& o, const Received& message, int wire, const Out<float>& to) {
            const Wire w = wire_of(wire);
            nb::gil_scoped_release release;
            o.unpack(reinterpret_cast<const std::byte*>(message.data()), message.size(), w, to.data(), to.size());
        }, nb::arg("message"), nb::arg("wire"), nb::arg("rows").noconvert());
    nb::class_<Incoming>(m, "Incoming")
        .def(nb::new_([](const In<int64_t>& keys, const In<int64_t>& counts, std::vector<size_t> dims) {
            std::vector<int64_t> of_member(counts.data(), counts.data() + counts.size());
            nb::gil_scoped_release release;
            return new Incoming(keys.data(), keys.size(), std::move(of_member), std::move(dims));
        }), nb::arg("keys"), nb::arg("counts"), nb::arg("dims"))
        .def_ro("starts", &Incoming::starts)
        .def("keys", [](nb::handle self, size_t t) {
            Unique& u = nb::cast<Incoming&>(self).unique.at(t);
            return view(u.keys.data(), u.count, self);
        })
        .def("answer", [](const Incoming& in, const In<float>& rows, int wire, const Message& message) {
            const Wire w = wire_of(wire);
            std::byte* to = bytes_in(message, in.bytes(w));
            nb::gil_scoped_release release;
            in.answer(rows.data(), rows.size(), w, to);
        }, nb::arg("rows"), nb::arg("wire"), nb::arg("message").noconvert())
        .def("sum", [](const Incoming& in, const Received& message, int wire, size_t node, float divisor,
                       const Out<float>& out) {
            const Wire w = wire_of(wire);
            if (node == 0 || divisor == 0) throw std::invalid_argument("a node has at least one member");
            const auto* bytes = reinterpret_cast<const std::byte*>(message.data());
            nb::gil_scoped_release release;
            in.sum(bytes, message.size(), w, node, divisor, out.data(), out.size());
        }, nb::arg("message"), nb::arg("wire"), nb::arg("node"), nb::arg("divisor"), nb::arg("sums").noconvert());
}

}  // namespace hotrow
