// The Python face of the native core. Arrays come in as NumPy arrays and are worked on in place; every call that
// touches rows releases the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "batch.hpp"
#include "cache_face.hpp"
#include "durable_face.hpp"
#include "grouping.hpp"
#include "keys_face.hpp"
#include "owners_face.hpp"
#include "pooling.hpp"
#include "spare_face.hpp"
#include "store.hpp"
#include "threads.hpp"
#include "windows_face.hpp"
#include "wire_face.hpp"

using namespace hotrow;

namespace {

// Where the rows of a fetch were found: a guess that spares the update a second search.
struct Slots {
    std::vector<std::vector<uint32_t>> of_table;
};

struct Layout {
    std::vector<size_t> dims;
    std::vector<std::vector<FeatureSpec>> groups;
};

// A grouping with the arrays it points into.
struct BatchGrouping {
    std::vector<In<int64_t>> arrays;
    std::vector<std::optional<In<float>>> weights;
    std::unique_ptr<Grouping> grouping;
};

using Keys = std::vector<In<int64_t>>;
using Positions = std::vector<std::optional<In<int64_t>>>;

template <class T>
std::vector<Request> requests_for(const std::vector<Store*>& stores, const Keys& keys, const Positions& positions,
                                  const T& rows, const std::vector<size_t>& starts, bool check) {
    if (keys.size() != stores.size() || positions.size() != stores.size() || starts.size() < stores.size())
        throw std::invalid_argument("each store needs its keys, positions and where its rows start");
    std::vector<Request> out(stores.size());
    for (size_t t = 0; t < stores.size(); ++t) {
        if (stores[t] == nullptr) throw std::invalid_argument("a store is None");
        Request& r = out[t];
        r.store = stores[t];
        r.keys = keys[t].data();
        r.n = keys[t].size();
        r.rows = const_cast<float*>(rows.data()) + starts[t];
        if (positions[t]) {
            if (positions[t]->size() != r.n) throw std::invalid_argument("each key needs a position");
            r.positions = positions[t]->data();
            const size_t room = check ? (rows.size() - std::min(rows.size(), starts[t])) / r.store->shape().dim : SIZE_MAX;
            for (size_t i = 0; i < r.n; ++i)
                if (static_cast<uint64_t>(r.positions[i]) >= room)
                    throw std::invalid_argument("a position is outside the rows' array");
        } else if (check && r.n > (rows.size() - std::min(rows.size(), starts[t])) / r.store->shape().dim) {
            throw std::invalid_argument("the rows' array is too small for the keys");
        }
    }
    return out;
}

template <class M>
std::vector<Matrix> matrices(const std::vector<std::optional<M>>& arrays) {
    std::vector<Matrix> out;
    for (const auto& m : arrays)
        out.push_back(m ? Matrix{const_cast<float*>(m->data()), m->shape(1), m->shape(0)} : Matrix{nullptr, 0, 0});
    return out;
}

// A grouping's result matrices, or their gradients, and which table of it each store's request is for.
struct Places {
    BatchGrouping* batch;
    std::vector<size_t> tables;
    std::vector<Matrix> matrices;
    Addresses addresses;

    Places(BatchGrouping* b, std::vector<size_t> t, std::vector<Matrix> m)
        : batch(b), tables(std::move(t)), matrices(std::move(m)) {}
    Places(const Places&) = delete;

    // Lets the requests sum their gradients from here.
    void connect(std::vector<Request>& requests) {
        const Grouping& grouping = *batch->grouping;
        if (tables.size() != requests.size()) throw std::invalid_argument("each store needs its table of the grouping");
        addresses = grouping.addresses(matrices);
        for (size_t k = 0; k < requests.size(); ++k) {
            if (tables[k] >= grouping.tables.size()) throw std::invalid_argument("there is no such table");
            const Request& r = requests[k];
            if (r.store->shape().dim != grouping.dim(tables[k])) throw std::invalid_argument("a store has rows of another dim");
            const size_t unique = grouping.tables[tables[k]].count;
            bool inside = r.positions != nullptr || r.n <= unique;
            for (size_t i = 0; r.positions != nullptr && i < r.n; ++i)
                inside &= static_cast<uint64_t>(r.positions[i]) < unique;
            if (!inside) throw std::invalid_argument("the keys are not those of the grouping");
            requests[k].grouping = &grouping;
            requests[k].addresses = &addresses;
            requests[k].table = tables[k];
        }
    }

    // Requests for all rows of the grouping, each of which goes to, or comes from, what stands here.
    std::vector<Request> requests(const std::vector<Store*>& stores) const {
        const Grouping& grouping = *batch->grouping;
        std::vector<bool> asked(grouping.tables.size(), false);
        for (const size_t t : tables)
            if (t < asked.size()) asked[t] = true;
        if (stores.size() != tables.size() || tables.size() != asked.size() || !std::all_of(asked.begin(), asked.end(), std::identity()))
            throw std::invalid_argument("each table of the grouping needs a store");
        std::vector<Request> out(stores.size());
        for (size_t k = 0; k < stores.size(); ++k) {
            if (stores[k] == nullptr) throw std::invalid_argument("a store is None");
            if (stores[k]->shape().dim != grouping.dim(tables[k])) throw std::invalid_argument("a store has rows of another dim");
            out[k].store = stores[k];
            out[k].keys = grouping.tables[tables[k]].keys.data();
            out[k].n = grouping.tables[tables[k]].count;
            out[k].grouping = &grouping;
            out[k].table = tables[k];
            out[k].results = &matrices;
        }
        return out;
    }
};

std::unique_ptr<Slots> fetch_all(std::vector<Request>& requests, uint32_t now) {
    auto slots = std::make_unique<Slots>();
    slots->of_table.resize(requests.size());
    for (size_t t = 0; t < requests.size(); ++t) {
        slots->of_table[t].resize(requests[t].n);
        requests[t].slots = slots->of_table[t].data();
    }
    fetch(requests, now);
    return slots;
}

Slots* fetch_rows(const std::vector<Store*>& stores, const Keys& keys, const Positions& positions,
                  const Out<float>& rows, const std::vector<size_t>& starts, uint32_t now) {
    auto requests = requests_for(stores, keys, positions, rows, starts, true);
    nb::gil_scoped_release release;
    return fetch_all(requests, now).release();
}

Slots* fetch_results(const std::vector<Store*>& stores, const Places& places, uint32_t now) {
    auto requests = places.requests(stores);
    nb::gil_scoped_release release;
    return fetch_all(requests, now).release();
}

void read_results(const std::vector<Store*>& stores, const Places& places, uint32_t now) {
    auto requests = places.requests(stores);
    nb::gil_scoped_release release;
    read(requests, now);
}

void update_all(std::vector<Request>& requests, const std::vector<float>& rates, Slots* slots, Places* places, const Push* push) {
    if (rates.size() != requests.size()) throw std::invalid_argument("each store needs a learning rate");
    for (size_t t = 0; t < requests.size(); ++t) {
        requests[t].lr = rates[t];
        if (push != nullptr) requests[t].push = *push;
        if (slots == nullptr) continue;
        if (slots->of_table.size() != requests.size() || slots->of_table[t].size() != requests[t].n)
            throw std::invalid_argument("the slots are of another fetch");
        requests[t].slots = slots->of_table[t].data();
    }
    nb::gil_scoped_release release;
    if (places != nullptr) places->connect(requests);
    update(requests);
}

void update_results(const std::vector<Store*>& stores, Places& places, const std::vector<float>& rates, Slots* slots) {
    auto requests = places.requests(stores);
    update_all(requests, rates, slots, &places, nullptr);
}

void read_rows(const std::vector<Store*>& stores, const Keys& keys, const Positions& positions, const Out<float>& rows,
               const std::vector<size_t>& starts, uint32_t now) {
    auto requests = requests_for(stores, keys, positions, rows, starts, true);
    nb::gil_scoped_release release;
    read(requests, now);
}

void update_rows(const std::vector<Store*>& stores, const Keys& keys, const Positions& positions, const In<float>& grads,
                 const std::vector<size_t>& starts, const std::vector<float>& rates, Slots* slots, Places* places,
                 const Push* push) {
    auto requests = requests_for(stores, keys, positions, grads, starts, places == nullptr);
    update_all(requests, rates, slots, places, push);
}

Request request_of(Store& store, const In<int64_t>& keys) {
    Request r;
    r.store = &store;
    r.keys = keys.data();
    r.n = keys.size();
    return r;
}

Store* make_store(size_t dim, bool bf16, int optimizer, float weight_decay, float clip_value, float clip_norm, float bound,
                  float momentum, float dampening, bool nesterov, double beta1, double beta2, float eps, float initial,
                  int init, float init_scale, uint64_t salt, uint32_t admit_count, double admit_probability,
                  size_t sketch_bytes, size_t capacity, bool lfu, uint32_t ttl, const std::string& folder,
                  const std::string& folder_settings, bool fresh) {
    StoreSettings s;
    s.optimizer = Optimizer{static_cast<OptimizerKind>(optimizer), weight_decay, clip_value, clip_norm, bound, momentum,
                            dampening, nesterov, beta1, beta2, eps, initial};
    s.shape = Shape{dim, s.optimizer.state_dim(dim), bf16};
    s.init = Init{static_cast<InitKind>(init), init_scale, salt};
    s.admit_count = admit_count;
    s.admit_probability = admit_probability;
    s.sketch_bytes = sketch_bytes;
    s.capacity = capacity;
    s.lfu = lfu;
    s.ttl = ttl;
    nb::gil_scoped_release release;
    return new Store(s, Folder{folder, folder_settings, fresh});
}

nb::object columns(Columns&& c, bool bf16) {
    nb::dict out;
    out["keys"] = give(std::move(c.keys));
    auto* kept = new std::vector<std::byte>(std::move(c.values));
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<std::byte>*>(p); });
    if (bf16)
        out["values"] = Array<uint16_t>(kept->data(), {kept->size() / 2}, owner);
    else
        out["values"] = Array<float>(kept->data(), {kept->size() / 4}, owner);
    out["state"] = give(std::move(c.state));
    out["clocks"] = give(std::move(c.clocks));
    out["uses"] = give(std::move(c.uses));
    out["last"] = give(std::move(c.last));
    return out;
}

void import_columns(Store& store, const In<int64_t>& keys, const In<uint8_t>& values, const In<float>& state,
                    const In<uint32_t>& clocks, const In<uint32_t>& uses, const In<uint32_t>& last) {
    const size_t n = keys.size();
    if (values.size() != n * store.shape().value_bytes() || state.size() != n * store.shape().state_dim ||
        clocks.size() != n || uses.size() != n || last.size() != n)
        throw std::invalid_argument("the columns do not have one row for each key");
    Request r = request_of(store, keys);
    const Imported in{reinterpret_cast<const std::byte*>(values.data()), state.data(), clocks.data(), uses.data(),
                      last.data()};
    nb::gil_scoped_release release;
    import_rows(std::move(r), in);
}

// Refuses bags that do not lie within a group's values; begins may be null.
void check_bags(const int64_t* offsets, const int64_t* begins, size_t bags, size_t values) {
    const auto size = static_cast<int64_t>(values);
    bool wrong = offsets[0] < 0;  // compared and not subtracted, which could overflow
    for (size_t b = 0; b < bags; ++b) wrong |= offsets[b + 1] < offsets[b];
    if (begins == nullptr)
        wrong |= offsets[bags] > size;
    else if (!wrong)
        for (size_t b = 0; b < bags; ++b) {
            const int64_t length = offsets[b + 1] - offsets[b];
            wrong |= (begins[b] < 0) | (length > size) | (begins[b] > size - std::min(length, size));
        }
    if (wrong) throw std::invalid_argument("offsets, begins and values of a group do not fit together");
}

BatchGrouping* make_grouping(const Layout& layout, std::vector<In<int64_t>> values, std::vector<In<int64_t>> offsets,
                             std::vector<std::optional<In<float>>> weights,
                             std::optional<std::vector<std::optional<In<int64_t>>>> begins) {
    const size_t n = layout.groups.size();
    if (!begins) begins.emplace(n);
    if (values.size() != n || offsets.size() != n || weights.size() != n || begins->size() != n)
        throw std::invalid_argument("each group needs values and offsets, and weights and begins or None");
    auto out = std::make_unique<BatchGrouping>();
    std::vector<GroupInput> inputs;
    for (size_t g = 0; g < n; ++g) {
        const size_t features = layout.groups[g].size();
        if (features == 0 || offsets[g].size() == 0 || (offsets[g].size() - 1) % features != 0)
            throw std::invalid_argument("a group needs features x samples + 1 offsets");
        const size_t samples = (offsets[g].size() - 1) / features;
        const auto& from = (*begins)[g];
        if (from && from->size() != features * samples) throw std::invalid_argument("each bag needs a begin");
        if (weights[g] && weights[g]->size() < values[g].size()) throw std::invalid_argument("each value needs a weight");
        check_bags(offsets[g].data(), from ? from->data() : nullptr, features * samples, values[g].size());
        inputs.push_back({values[g].data(), offsets[g].data(), weights[g] ? weights[g]->data() : nullptr,
                          from ? from->data() : nullptr, samples});
        out->arrays.push_back(std::move(values[g]));
        out->arrays.push_back(std::move(offsets[g]));
        if (from) out->arrays.push_back(*from);
    }
    out->weights = std::move(weights);
    nb::gil_scoped_release release;
    out->grouping = std::make_unique<Grouping>(layout.dims, layout.groups, inputs);
    return out.release();
}

void bind_store(nb::module_& m) {
    nb::class_<Slots>(m, "Slots");
    nb::class_<Store>(m, "Store")
        .def(nb::new_(&make_store), nb::kw_only(), nb::arg("dim"), nb::arg("bf16"), nb::arg("optimizer"),
             nb::arg("weight_decay"), nb::arg("clip_value"), nb::arg("clip_norm"), nb::arg("bound"), nb::arg("momentum"),
             nb::arg("dampening"), nb::arg("nesterov"), nb::arg("beta1"), nb::arg("beta2"), nb::arg("eps"),
             nb::arg("initial"), nb::arg("init"), nb::arg("init_scale"), nb::arg("salt"), nb::arg("admit_count"),
             nb::arg("admit_probability"), nb::arg("sketch_bytes"), nb::arg("capacity"), nb::arg("lfu"), nb::arg("ttl"),
             nb::arg("folder") = "", nb::arg("folder_settings") = "", nb::arg("fresh") = false)
        .def_prop_ro("dim", [](const Store& s) { return s.shape().dim; })
        .def_prop_ro("state_dim", [](const Store& s) { return s.shape().state_dim; })
        .def_prop_ro("bf16", [](const Store& s) { return s.shape().bf16; })
        .def("rows", &Store::rows_at_once, nb::call_guard<nb::gil_scoped_release>())
        .def("bytes", &Store::bytes, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_rw(
            "steps", [](const Store& s) { return s.steps(); }, [](Store& s, uint64_t n) { s.set_steps(n); })
        .def_prop_ro("life", &Store::life)
        .def_prop_ro("undone", &Store::undone)
        .def("erase",
             [](Store& store, const In<int64_t>& keys) {
                 Request r = request_of(store, keys);
                 nb::gil_scoped_release release;
                 return erase(std::move(r));
             })
        .def("contains",
             [](Store& store, const In<int64_t>& keys, const Out<bool>& out) {
                 if (out.size() != keys.size()) throw std::invalid_argument("each key needs an answer");
                 Request r = request_of(store, keys);
                 nb::gil_scoped_release release;
                 contains(std::move(r), out.data());
             },
             nb::arg("keys"), nb::arg("out").noconvert())
        .def("import_columns", &import_columns)
        .def("rows_of",
             [](Store& s, const In<int64_t>& keys, bool erase) {
                 Columns c;
                 {
                     nb::gil_scoped_release release;
                     c = s.rows_of(keys.data(), keys.size(), erase);
                 }
                 return columns(std::move(c), s.shape().bf16);
             })
        .def(
            "begin_snapshot", [](Store& s, int cut) { s.begin_snapshot(static_cast<Cut>(cut)); },
            nb::call_guard<nb::gil_scoped_release>())
        .def("read_snapshot",
             [](Store& s, size_t most) {
                 Columns c;
                 {
                     nb::gil_scoped_release release;
                     c = s.read_snapshot(most);
                 }
                 return columns(std::move(c), s.shape().bf16);
             })
        .def("end_snapshot", &Store::end_snapshot, nb::call_guard<nb::gil_scoped_release>())
        .def("tracks_erased", &Store::tracks_erased, nb::call_guard<nb::gil_scoped_release>())
        .def("settle", &Store::settle, nb::call_guard<nb::gil_scoped_release>())
        .def_ro("cut_steps", &Store::cut_steps)
        .def("cut_sketch", [](const Store& s) { return give(std::vector<uint8_t>(s.cut_sketch)); })
        .def("cut_erased", [](const Store& s) { return give(std::vector<int64_t>(s.cut_erased)); })
        .def("set_sketch", [](Store& s, const In<uint8_t>& counters) { s.set_sketch(counters.data(), counters.size()); })
        .def("initial", [](const Store& s, const In<int64_t>& keys, const OutMatrix& out) {
            if (out.shape(0) != keys.size() || out.shape(1) != s.shape().dim)
                throw std::invalid_argument("each key needs a row");
            nb::gil_scoped_release release;
            for (size_t i = 0; i < keys.size(); ++i) s.initial_values(keys.data()[i], out.data() + i * s.shape().dim);
        });
    m.def("fetch", &fetch_rows, nb::rv_policy::take_ownership, nb::arg("stores"), nb::arg("keys"), nb::arg("positions"),
          nb::arg("rows").noconvert(), nb::arg("starts"), nb::arg("step"));
    m.def("read", &read_rows, nb::arg("stores"), nb::arg("keys"), nb::arg("positions"), nb::arg("rows").noconvert(),
          nb::arg("starts"), nb::arg("step"));
    m.def("fetch_results", &fetch_results, nb::rv_policy::take_ownership, nb::arg("stores"), nb::arg("places"), nb::arg("step"));
    m.def("read_results", &read_results, nb::arg("stores"), nb::arg("places"), nb::arg("step"));
    m.def("update_results", &update_results, nb::arg("stores"), nb::arg("places"), nb::arg("rates"), nb::arg("slots").none());
    m.def("update", &update_rows, nb::arg("stores"), nb::arg("keys"), nb::arg("positions"), nb::arg("grads"),
          nb::arg("starts"), nb::arg("rates"), nb::arg("slots").none(), nb::arg("places").none() = nb::none(),
          nb::arg("push").none() = nb::none());
}

void bind_grouping(nb::module_& m) {
    nb::class_<Layout>(m, "Layout")
        .def("__init__",
             [](Layout* self, std::vector<size_t> dims, const std::vector<std::vector<std::pair<int64_t, int>>>& groups) {
                 new (self) Layout{std::move(dims), {}};
                 for (const auto& group : groups) {
                     self->groups.emplace_back();
                     for (const auto& [table, pooling] : group) {
                         const size_t t = table < 0 ? kNoTable : static_cast<size_t>(table);
                         if (t != kNoTable && t >= self->dims.size()) throw std::invalid_argument("there is no such table");
                         self->groups.back().push_back({t, static_cast<Pooling>(pooling)});
                     }
                 }
             })
        .def("group", &make_grouping, nb::rv_policy::take_ownership, nb::arg("values"), nb::arg("offsets"), nb::arg("weights"),
             nb::arg("begins") = nb::none());

    const auto unique = [](nb::handle self, size_t t) -> Unique& {
        return nb::cast<BatchGrouping&>(self).grouping->tables.at(t);
    };
    nb::class_<BatchGrouping>(m, "Grouping")
        .def_prop_ro("starts", [](const BatchGrouping& g) { return g.grouping->row_starts; })
        .def("keys", [unique](nb::handle self, size_t t) { return view(unique(self, t).keys.data(), unique(self, t).count, self); })
        .def("inverse",
             [unique](nb::handle self, size_t t) {
                 return view(unique(self, t).inverse.data(), unique(self, t).lookups, self);
             })
        .def("order",
             [unique](nb::handle self, size_t t) { return view(unique(self, t).order.data(), unique(self, t).lookups, self); })
        .def("lookup_starts",
             [unique](nb::handle self, size_t t) {
                 return view(unique(self, t).starts.data(), unique(self, t).count + 1, self);
             })
        .def("windows",
             [](nb::handle self, size_t sequence) -> std::optional<nb::tuple> {
                 const Stretches* w = nb::cast<BatchGrouping&>(self).grouping->stretches_of_sequence(sequence);
                 if (w == nullptr) return std::nullopt;
                 return nb::make_tuple(w->stored, view(const_cast<int64_t*>(w->begins.data()), w->begins.size(), self));
             })
        .def("place",
             [](const BatchGrouping& b, const std::vector<const KeyMap*>& maps, const std::vector<int32_t>& first,
                const std::vector<size_t>& segments, const std::vector<int32_t>& behind) {
                 const size_t tables = b.grouping->tables.size();
                 std::vector<Home> homes;
                 for (size_t t = 0; t < tables && first.size() == tables && segments.size() == tables; ++t)
                     homes.push_back({first[t], segments[t]});
                 if (maps.size() != tables || homes.size() != tables ||
                     std::find(maps.begin(), maps.end(), nullptr) != maps.end() ||
                     std::any_of(homes.begin(), homes.end(), [&](const Home& h) { return h.segment >= behind.size(); }))
                     throw std::invalid_argument("each table needs its map, its first slot and its segment");
                 Placed placed;
                 {
                     nb::gil_scoped_release release;
                     placed = place(*b.grouping, maps, homes, behind);
                 }
                 nb::list others;
                 for (auto& keys : placed.others) others.append(give(std::move(keys)));
                 return nb::make_tuple(give(std::move(placed.slots)), give(std::move(placed.held)), others,
                                       placed.hits);
             },
             nb::arg("maps"), nb::arg("first"), nb::arg("segments"), nb::arg("behind"))
        .def("forward",
             [](const BatchGrouping& g, const In<float>& rows, const std::vector<std::optional<OutMatrix>>& out) {
                 if (rows.size() < g.grouping->row_starts.back()) throw std::invalid_argument("too few rows");
                 const auto to = matrices(out);
                 g.grouping->check(to);
                 nb::gil_scoped_release release;
                 g.grouping->forward(rows.data(), to);
             },
             nb::arg("rows"), nb::arg("out").noconvert())
        .def("backward",
             [](const BatchGrouping& g, const std::vector<std::optional<InMatrix>>& grads, const Out<float>& row_grads) {
                 if (row_grads.size() < g.grouping->row_starts.back()) throw std::invalid_argument("too few rows");
                 const auto from = matrices(grads);
                 g.grouping->check(from);
                 nb::gil_scoped_release release;
                 g.grouping->backward(from, row_grads.data());
             },
             nb::arg("grads"), nb::arg("row_grads").noconvert());
    nb::class_<Places>(m, "Places")
        .def(
            "__init__",
            [](Places* self, BatchGrouping* batch, std::vector<size_t> tables,
               const std::vector<std::optional<OutMatrix>>& out) {
                auto to = matrices(out);
                batch->grouping->check(to);
                new (self) Places(batch, std::move(tables), std::move(to));
            },
            nb::arg("grouping"), nb::arg("tables"), nb::arg("matrices").noconvert(), nb::keep_alive<1, 2>(),
            nb::keep_alive<1, 4>());
    m.def("unique", [](const In<int64_t>& keys) {
        Unique u;
        {
            nb::gil_scoped_release release;
            u = dedup(keys.data(), keys.size());
        }
        return nb::make_tuple(give(std::vector<int64_t>(u.keys.data(), u.keys.data() + u.count)),
                              give(std::vector<int32_t>(u.inverse.data(), u.inverse.data() + u.lookups)));
    });
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Hotrow's native core: row store, grouping, pooling and fused optimizers.";
    m.def("set_threads", [](size_t n) { Pool::get().set_threads(n); });
    m.def("threads", [] { return Pool::get().threads(); });
    nb::set_leak_warnings(false);  // torch keeps references past the end of the interpreter
    bind_spare(m);
    bind_durable(m);
    bind_store(m);
    bind_grouping(m);
    bind_keymap(m);
    bind_owners(m);
    bind_counts(m);
    bind_inflight(m);
    bind_windows(m);
    bind_wire(m);
    bind_cache(m);
}
