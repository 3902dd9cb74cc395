// Adds keys on their way between ranks to the Python module. Compiled apart from the store, as wire_face.hpp is and for
// the same reason.
#pragma once

#include <nanobind/nanobind.h>

namespace hotrow {

void bind_owners(nanobind::module_& m);

}  // namespace hotrow
