// The Python face of caches and of the exchange that answers them. A unit of its own: see cache_face.hpp.
#include "cache_face.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "arrays.hpp"
#include "trip.hpp"

namespace hotrow {
namespace {

using Keys = std::vector<In<int64_t>>;

// The bytes of an array from a multiple of eight on; those that came over a network may begin anywhere.
class Aligned {
public:
    explicit Aligned(const In<uint8_t>& from) : data_(reinterpret_cast<const std::byte*>(from.data())) {
        if (reinterpret_cast<uintptr_t>(data_) % 8 == 0) return;
        copy_.resize((from.size() + 7) / 8);
        std::memcpy(copy_.data(), data_, from.size());
        data_ = reinterpret_cast<const std::byte*>(copy_.data());
    }
    const std::byte* data() const { return data_; }

private:
    const std::byte* data_;
    std::vector<uint64_t> copy_;
};

Array<uint8_t> give_bytes(std::vector<std::byte>&& from) {
    auto* kept = new std::vector<std::byte>(std::move(from));
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<std::byte>*>(p); });
    return Array<uint8_t>(kept->data(), {kept->size()}, owner);
}

std::vector<BatchKeys> table_keys(const std::vector<size_t>& tables, const Keys& keys, size_t count) {
    if (tables.size() != keys.size()) throw std::invalid_argument("each table needs its keys");
    std::vector<BatchKeys> out;
    std::vector<bool> seen(count);
    for (size_t k = 0; k < tables.size(); ++k) {
        if (tables[k] >= count || seen[tables[k]]) throw std::invalid_argument("there is no such table, or it stands twice");
        seen[tables[k]] = true;
        out.push_back({tables[k], keys[k].data(), keys[k].size()});
    }
    return out;
}

// A cache keeps the Python objects of its copies' stores; whoever drops the last reference to it holds the GIL.
struct KeptCache : Cache {
    KeptCache(nb::list kept, const std::vector<Store*>& stores, const std::vector<bool>& evicts, const CacheSettings& given)
        : Cache(stores, evicts, given), objects(std::move(kept)) {}
    nb::list objects;
};

std::shared_ptr<Cache> make_cache(const nb::list& objects, const std::vector<bool>& evicts, size_t capacity, bool in_bytes,
                                  int keep, uint32_t popular, std::optional<uint32_t> bound, double drift, uint32_t margin,
                                  bool sole, uint32_t sample, uint32_t shards, uint64_t client) {
    std::vector<Store*> stores;
    for (nb::handle store : objects) stores.push_back(nb::cast<Store*>(store));
    if (stores.empty() || stores.size() != evicts.size() || stores.size() > 0xFFFF || shards == 0 || keep < 0 || keep > 2)
        throw std::invalid_argument("a cache needs tables, each with its settings, and a shard");
    CacheSettings s{capacity, in_bytes, static_cast<Keep>(keep), popular, bound.value_or(kUnbounded), drift,
                    margin, sole, sample, shards, client};
    return std::make_shared<KeptCache>(objects, stores, evicts, s);
}

template <class Of>
std::vector<std::vector<int64_t>> keys_of(Cache& cache, Of of) {
    std::vector<std::vector<int64_t>> out(cache.tables.size());
    parallel_for(out.size(), [&](size_t t) {  // each its own table
        Copies& copies = *cache.tables[t];
        for (size_t p = 0; p < Store::kParts; ++p) {
            const PartLocks lock(copies.store, p, p + 1);
            const Part& part = copies.store.part(p);
            part.for_each([&](uint32_t slot) {
                if (of(copies, part, slot)) out[t].push_back(int64_t{part.header(slot).key});
            });
        }
    });
    return out;
}

nb::list give_keys(std::vector<std::vector<int64_t>>&& keys) {
    nb::list out;
    for (auto& k : keys) out.append(give(std::move(k)));
    return out;
}

// Calls body(copies, part, slot, hash) for every key that has a copy.
template <class Body>
void for_copies(Cache& cache, size_t table, const In<int64_t>& keys, Body body) {
    Copies& copies = *cache.tables.at(table);
    for (size_t i = 0; i < keys.size(); ++i) {
        const uint64_t hash = hash_key(keys.data()[i]);
        const size_t p = Store::part_of(hash);
        const PartLocks lock(copies.store, p, p + 1);
        Part& part = copies.store.part(p);
        if (const uint32_t slot = part.find(keys.data()[i], hash); slot != kNoSlot) body(copies, part, slot, hash);
    }
}

// For each list which of its keys, each of which it has once, another list has too.
nb::list shared_keys(const Keys& lists) {
    std::vector<std::vector<uint8_t>> out(lists.size());
    {
        nb::gil_scoped_release release;
        std::vector<int64_t> all;
        for (const auto& keys : lists) all.insert(all.end(), keys.data(), keys.data() + keys.size());
        const Unique unique = dedup(all.data(), all.size());
        size_t at = 0;
        for (size_t k = 0; k < lists.size(); ++k) {
            out[k].resize(lists[k].size());
            for (size_t i = 0; i < out[k].size(); ++i, ++at) {
                const auto u = static_cast<size_t>(unique.inverse[at]);
                out[k][i] = unique.starts[u + 1] - unique.starts[u] > 1;
            }
        }
    }
    nb::list given;
    for (auto& shared : out) {
        auto* kept = new std::vector<uint8_t>(std::move(shared));
        nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<uint8_t>*>(p); });
        given.append(Array<bool>(kept->data(), {kept->size()}, owner));
    }
    return given;
}

nb::dict counts_of(const Cache& cache) {
    const CacheCounts& c = cache.counts;
    nb::dict out;
    const auto put = [&](const char* name, uint64_t n) { out[name] = n; };
    put("hits", c.hits), put("valid", c.valid), put("invalid", c.invalid), put("misses", c.misses);
    put("evictions", c.evictions), put("checked", c.checked), put("written_rows", c.written_rows);
    put("fetched_rows", c.fetched_rows), put("fresh_rows", c.fresh_rows), put("dropped", c.dropped);
    put("exchanges", c.exchanges), put("sent_bytes", c.sent_bytes), put("received_bytes", c.received_bytes);
    put("most_behind", c.most_behind);
    return out;
}

void bind_answers(nb::module_& m) {
    nb::class_<Ledger>(m, "Ledger").def(nb::init<>()).def_prop_ro("epoch", &Ledger::epoch);
    m.def(
        "answer_exchange",
        [](const std::vector<Store*>& stores, Ledger& ledger, const In<uint8_t>& request, bool again,
           const Push* push) {
            std::vector<std::byte> out;
            {
                nb::gil_scoped_release release;
                const Aligned blob(request);
                out = Answer(stores, blob.data(), request.size()).make(ledger, again, push == nullptr ? Push{} : *push);
            }
            return give_bytes(std::move(out));
        },
        nb::arg("stores"), nb::arg("ledger"), nb::arg("request"), nb::arg("again"), nb::arg("push").none() = nb::none());
}

// The clocks of copies: start, current and known, 0 for keys that are not here, and whether they are.
nb::tuple clocks_of(Cache& cache, size_t table, const In<int64_t>& keys) {
    Copies& copies = *cache.tables.at(table);
    std::vector<uint32_t> start(keys.size()), current(keys.size()), known(keys.size());
    std::vector<uint8_t> here(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) {
        const uint64_t hash = hash_key(keys.data()[i]);
        const size_t p = Store::part_of(hash);
        const PartLocks lock(copies.store, p, p + 1);
        const Part& part = copies.store.part(p);
        const uint32_t slot = part.find(keys.data()[i], hash);
        if (slot == kNoSlot) continue;
        here[i] = 1;
        start[i] = copies.side(slot).start;
        current[i] = part.header(slot).clock;
        known[i] = copies.side(slot).known;
    }
    return nb::make_tuple(give(std::move(start)), give(std::move(current)), give(std::move(known)), give(std::move(here)));
}

// Which keys have a copy that may be read as it is: not known to be further behind its row than the bound.
auto good_copies(Cache& cache, size_t table, const In<int64_t>& keys) {
    Copies& copies = *cache.tables.at(table);
    const CacheSettings& s = cache.settings;
    std::vector<uint8_t> good(keys.size());
    {
        nb::gil_scoped_release release;
        for (size_t i = 0; i < keys.size(); ++i) {
            const uint64_t hash = hash_key(keys.data()[i]);
            const size_t p = Store::part_of(hash);
            const PartLocks lock(copies.store, p, p + 1);
            const Part& part = copies.store.part(p);
            const uint32_t slot = part.find(keys.data()[i], hash);
            if (slot == kNoSlot) continue;
            const Side& side = copies.side(slot);
            const uint64_t most = uint64_t{part.header(slot).clock} + s.read_bound();
            good[i] = s.sole || s.bound == kUnbounded || (side.doubt == cache.doubt && side.known <= most);
        }
    }
    return give(std::move(good));
}

}  // namespace

void bind_cache(nb::module_& m) {
    bind_answers(m);
    m.def("shared_keys", &shared_keys);
    nb::class_<Cache>(m, "Cache")
        .def(nb::new_(&make_cache), nb::kw_only(), nb::arg("stores"), nb::arg("evicts"), nb::arg("capacity"), nb::arg("in_bytes"),
             nb::arg("keep"), nb::arg("popular"), nb::arg("bound").none(), nb::arg("drift"), nb::arg("margin"),
             nb::arg("sole"), nb::arg("sample"), nb::arg("shards"), nb::arg("client"))
        .def("rows", [](const Cache& c) {
            std::vector<size_t> out;
            for (const auto& t : c.tables) out.push_back(t->rows);
            return out;
        })
        .def("row_bytes", [](const Cache& c) {
            std::vector<size_t> out;
            for (const auto& t : c.tables) out.push_back(t->row_bytes);
            return out;
        })
        .def("used", &Cache::used)
        .def("dirty", [](Cache& c) {
            std::vector<std::vector<int64_t>> keys;
            {
                nb::gil_scoped_release release;
                keys = keys_of(c, [](const Copies& t, const Part& part, uint32_t slot) { return t.is_dirty(part, slot); });
            }
            return give_keys(std::move(keys));
        })
        .def("keys", [](Cache& c) { return give_keys(keys_of(c, [](const Copies&, const Part&, uint32_t) { return true; })); })
        .def("drop",  // forgets copies without writing them back
             [](Cache& c, size_t table, const In<int64_t>& keys) {
                 nb::gil_scoped_release release;
                 for_copies(c, table, keys, [](Copies& copies, Part& part, uint32_t slot, uint64_t hash) { copies.erase(part, slot, hash); });
                 c.forget_queue();
             })
        .def("settle",
             [](Cache& c, size_t table, const In<int64_t>& keys) {
                 nb::gil_scoped_release release;
                 for_copies(c, table, keys, [](Copies& copies, Part& part, uint32_t slot, uint64_t) { copies.settle(part, slot); });
             })
        .def("rejoin", [](Cache& c) {
            for (auto& t : c.tables) t->joined = false;
        })
        .def("clocks", &clocks_of)
        .def("good", &good_copies)
        .def("counts", &counts_of)
        .def("behind", [](const Cache& c) {
            std::vector<uint64_t> out(c.counts.behind.begin(), c.counts.behind.end());
            return give(std::move(out));
        });
    nb::class_<Trip>(m, "Trip")
        .def("__init__", [](Trip* self, std::shared_ptr<Cache> cache) { new (self) Trip(std::move(cache)); })
        .def("plan",
             [](Trip& trip, const Cache& cache, const std::vector<size_t>& tables, const Keys& keys, uint32_t step, bool flush) {
                 const auto given = table_keys(tables, keys, cache.tables.size());
                 nb::gil_scoped_release release;
                 flush ? trip.plan_flush(given, step) : trip.plan(given, step);
             },
             nb::arg("cache"), nb::arg("tables"), nb::arg("keys"), nb::arg("step"), nb::arg("flush") = false)
        .def_prop_ro("requests", [](nb::handle self) {  // None where there is nothing to say to a shard
            nb::list out;
            for (auto& blob : nb::cast<Trip&>(self).requests)
                blob.empty() ? out.append(nb::none())
                             : out.append(view(reinterpret_cast<const uint8_t*>(blob.data()), blob.size(), self));
            return out;
        })
        .def("absorb",
             [](Trip& trip, size_t shard, const In<uint8_t>& answer) {
                 nb::gil_scoped_release release;
                 const Aligned blob(answer);
                 trip.absorb(shard, blob.data(), answer.size());
             })
        .def("go_again", &Trip::go_again, nb::call_guard<nb::gil_scoped_release>())
        .def("release", &Trip::release, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("conflicts", &Trip::conflicts);
}

}  // namespace hotrow
