// The Python face of what travels between a client and its shards. A unit of its own: see wire_face.hpp.
#include "wire_face.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "wire.hpp"

namespace hotrow {
namespace {

Wire wire_of(int wire) {
    if (wire < 0 || wire > 2) throw std::invalid_argument("there is no such wire format");
    return static_cast<Wire>(wire);
}

nb::tuple give_values(WireValues&& values, Wire wire, size_t count, size_t rows) {
    if (wire == Wire::float32) return nb::make_tuple(give(std::move(values.floats), count));
    if (wire == Wire::bfloat16) return nb::make_tuple(give(std::move(values.halves), count));
    return nb::make_tuple(give(std::move(values.halves), count), give(std::move(values.exponents), rows));
}

// Rows one behind the other, table after table; throws where `values` or `rows` are not their number.
std::vector<WireRows> flat_rows(const std::vector<size_t>& counts, const std::vector<size_t>& dims, size_t values) {
    if (counts.size() != dims.size()) throw std::invalid_argument("each table needs a count and a dim");
    std::vector<WireRows> out;
    size_t row = 0, value = 0;
    for (size_t t = 0; t < counts.size(); ++t) {
        if (dims[t] == 0 || dims[t] > 4096 || counts[t] > values)
            throw std::invalid_argument("there are not as many values as the rows have");
        out.push_back({counts[t], dims[t], nullptr, row, value});
        row += counts[t];
        value += counts[t] * dims[t];
    }
    if (value != values) throw std::invalid_argument("there are not as many values as the rows have");
    return out;
}

size_t row_count(const std::vector<WireRows>& tables) {
    return tables.empty() ? 0 : tables.back().first_row + tables.back().n;
}

using Exponents = std::optional<In<int8_t>>;

void check_exponents(const Exponents& exponents, Wire wire, size_t rows) {
    if ((wire == Wire::float16) != exponents.has_value() || (exponents && exponents->size() != rows))
        throw std::invalid_argument("each row of scaled float16 needs an exponent, and others have none");
}

void bind_shipment(nb::module_& m) {
    nb::class_<Shipment>(m, "Shipment")
        .def_prop_ro("keys", [](nb::handle self) {
            auto& keys = nb::cast<Shipment&>(self).keys;
            return view<const int64_t>(keys.data(), keys.size(), self);
        })
        .def_prop_ro("counts", [](const Shipment& s) { return s.counts; })
        .def_prop_ro("values", &Shipment::values)
        .def("pack",
             [](const Shipment& s) {
                 PackedKeys packed;
                 {
                     nb::gil_scoped_release release;
                     packed = pack_keys(s.keys.data(), s.counts);
                 }
                 std::vector<int64_t> heads;
                 for (const KeyHead& h : packed.heads) {
                     heads.push_back(static_cast<int64_t>(h.count));
                     heads.push_back(static_cast<int64_t>(h.base));
                     heads.push_back(static_cast<int64_t>(h.width));
                 }
                 return nb::make_tuple(give(std::move(heads)), give(std::move(packed.bytes)));
             })
        .def("encode",
             [](const Shipment& s, const In<float>& from, int wire, float divisor) {
                 if (from.size() < s.reach) throw std::invalid_argument("a position is outside the array");
                 WireValues values;
                 {
                     nb::gil_scoped_release release;
                     values = encode(s.tables(), from.data(), wire_of(wire), divisor);
                 }
                 return give_values(std::move(values), wire_of(wire), s.values(), s.keys.size());
             },
             nb::arg("rows"), nb::arg("wire"), nb::arg("divisor") = 1.0f)
        .def("decode",
             [](const Shipment& s, const In<float>& values, const Out<float>& to) {
                 if (values.size() != s.values() || to.size() < s.reach)
                     throw std::invalid_argument("the values are not those of the shipment");
                 nb::gil_scoped_release release;
                 decode(s.tables(), values.data(), nullptr, nullptr, Wire::float32, to.data());
             },
             nb::arg("values"), nb::arg("rows").noconvert())
        .def("decode_halves",
             [](const Shipment& s, const In<uint16_t>& values, const Exponents& exponents, int wire, const Out<float>& to) {
                 if (values.size() != s.values() || to.size() < s.reach || wire_of(wire) == Wire::float32)
                     throw std::invalid_argument("the values are not those of the shipment");
                 check_exponents(exponents, wire_of(wire), s.keys.size());
                 nb::gil_scoped_release release;
                 decode(s.tables(), nullptr, values.data(), exponents ? exponents->data() : nullptr, wire_of(wire),
                        to.data());
             },
             nb::arg("values"), nb::arg("exponents").none(), nb::arg("wire"), nb::arg("rows").noconvert());
    m.def("ship",
          [](const std::vector<In<int64_t>>& keys, const std::vector<std::optional<In<int64_t>>>& positions,
             const std::vector<size_t>& starts, const std::vector<size_t>& dims, size_t shards) {
              if (positions.size() != keys.size() || starts.size() != keys.size() || dims.size() != keys.size())
                  throw std::invalid_argument("each table needs keys, positions, a start and a dim");
              if (shards < 1 || shards > 65535) throw std::invalid_argument("there are 1 to 65535 shards");
              std::vector<TableKeys> tables;
              for (size_t t = 0; t < keys.size(); ++t) {
                  if (positions[t] && positions[t]->size() != keys[t].size())
                      throw std::invalid_argument("each key needs a position");
                  if (dims[t] == 0 || dims[t] > 4096) throw std::invalid_argument("a dim is 1 to 4096");
                  tables.push_back({keys[t].data(), positions[t] ? positions[t]->data() : nullptr, keys[t].size(), starts[t],
                                    dims[t]});
              }
              nb::gil_scoped_release release;
              return ship(tables, shards);
          },
          nb::arg("keys"), nb::arg("positions"), nb::arg("starts"), nb::arg("dims"), nb::arg("shards"));
}

}  // namespace

void bind_wire(nb::module_& m) {
    bind_shipment(m);
    m.def("shards_of",
          [](const In<int64_t>& keys, size_t shards) {
              if (shards < 1 || shards > 65535) throw std::invalid_argument("there are 1 to 65535 shards");
              std::vector<uint16_t> out(keys.size());
              {
                  nb::gil_scoped_release release;
                  std::transform(keys.data(), keys.data() + keys.size(), out.begin(),
                                 [&](int64_t key) { return static_cast<uint16_t>(shard_of(key, shards)); });
              }
              return give(std::move(out));
          },
          nb::arg("keys"), nb::arg("shards"));
    m.def("unpack_keys",
          [](const In<int64_t>& heads, const In<uint8_t>& bytes) {
              if (heads.size() % 3 != 0) throw std::invalid_argument("each table needs count, base and width of its keys");
              std::vector<KeyHead> of(heads.size() / 3);
              for (size_t t = 0; t < of.size(); ++t) {
                  const int64_t* h = heads.data() + 3 * t;
                  of[t] = {static_cast<size_t>(h[0]), static_cast<uint64_t>(h[1]), static_cast<size_t>(h[2])};
              }
              std::vector<int64_t> keys;
              {
                  nb::gil_scoped_release release;
                  keys = unpack_keys(of, bytes.data(), bytes.size());
              }
              return give(std::move(keys));
          });
    m.def("encode_rows",
          [](const In<float>& rows, const std::vector<size_t>& counts, const std::vector<size_t>& dims, int wire) {
              const auto tables = flat_rows(counts, dims, rows.size());
              WireValues values;
              {
                  nb::gil_scoped_release release;
                  values = encode(tables, rows.data(), wire_of(wire), 1.0f);
              }
              return give_values(std::move(values), wire_of(wire), rows.size(), row_count(tables));
          },
          nb::arg("rows"), nb::arg("counts"), nb::arg("dims"), nb::arg("wire"));
    m.def("decode_rows",
          [](const In<uint16_t>& values, const Exponents& exponents, const std::vector<size_t>& counts,
             const std::vector<size_t>& dims, int wire) {
              const auto tables = flat_rows(counts, dims, values.size());
              if (wire_of(wire) == Wire::float32) throw std::invalid_argument("float32 needs no decoding");
              check_exponents(exponents, wire_of(wire), row_count(tables));
              std::unique_ptr<float[]> out(new float[values.size()]);
              {
                  nb::gil_scoped_release release;
                  decode(tables, nullptr, values.data(), exponents ? exponents->data() : nullptr, wire_of(wire), out.get());
              }
              return give(std::move(out), values.size());
          },
          nb::arg("values"), nb::arg("exponents").none(), nb::arg("counts"), nb::arg("dims"), nb::arg("wire"));
    m.def("sum_by_key",
          [](const std::vector<In<int64_t>>& keys, const std::vector<In<float>>& grads, size_t dim) {
              if (keys.size() != grads.size()) throw std::invalid_argument("each list of keys needs gradients");
              std::vector<int64_t> all;
              std::vector<const float*> of;
              for (size_t r = 0; r < keys.size(); ++r) {
                  if (dim == 0 || grads[r].size() != keys[r].size() * dim)
                      throw std::invalid_argument("each key needs a gradient");
                  all.insert(all.end(), keys[r].data(), keys[r].data() + keys[r].size());
                  for (size_t i = 0; i < keys[r].size(); ++i) of.push_back(grads[r].data() + i * dim);
              }
              Summed sum;
              {
                  nb::gil_scoped_release release;
                  sum = sum_by_key(all.data(), of.data(), all.size(), dim);
              }
              const size_t floats = sum.keys.size() * dim;
              return nb::make_tuple(give(std::move(sum.keys)), give(std::move(sum.grads), floats));
          },
          nb::arg("keys"), nb::arg("grads"), nb::arg("dim"));
}

}  // namespace hotrow
