// The Python face of durable tables' folders and of the journal of pushes.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>

#include "durable.hpp"
#include "journal.hpp"

namespace hotrow {

namespace nb = nanobind;

inline Sent sent_by(const nb::bytes& client, uint64_t sequence) {
    Sent out{{}, sequence};
    if (client.size() != out.client.size()) throw std::invalid_argument("a client has a name of 16 bytes");
    std::memcpy(out.client.data(), client.c_str(), out.client.size());
    return out;
}

inline void bind_durable(nb::module_& m) {
    nb::exception<FolderError>(m, "FolderError", nb::module_::import_("hotrow.errors").attr("StoreError"));
    nb::exception<UnderWay>(m, "UnderWay");
    m.def("folder_settings", &Durable::settings_in);
    nb::class_<Push>(m, "Push").def_ro("number", &Push::number);
    nb::class_<Journal>(m, "Journal")
        .def(nb::init<const std::string&>())
        .def("begin",
             [](Journal& journal, const nb::bytes& client, uint64_t sequence) -> std::optional<Push> {
                 const Push push = journal.begin(sent_by(client, sequence));
                 return push.number == 0 ? std::nullopt : std::optional(push);
             })
        .def("was_applied",
             [](Journal& journal, const nb::bytes& client, uint64_t sequence) {
                 return journal.was_applied(sent_by(client, sequence));
             })
        .def("done", &Journal::done)
        .def("release", &Journal::release)
        .def("drop", &Journal::drop)
        .def("unfinished", &Journal::unfinished);
}

}  // namespace hotrow
