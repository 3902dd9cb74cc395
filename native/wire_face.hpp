// Adds what travels between a client and its shards to the Python module. It is compiled apart from the store: in one unit the
// compiler inlines less of the loops over rows.
#pragma once

#include <nanobind/nanobind.h>

namespace hotrow {

void bind_wire(nanobind::module_& m);

}  // namespace hotrow
