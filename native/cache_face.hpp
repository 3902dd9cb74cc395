// Adds caches, and the exchange that answers them, to the Python module. Compiled apart, as wire_face.hpp is.
#pragma once

#include <nanobind/nanobind.h>

namespace hotrow {

void bind_cache(nanobind::module_& m);

}  // namespace hotrow
