// The Python face of spare.hpp.
#pragma once

#include <memory>
#include <utility>

#include "arrays.hpp"
#include "spare.hpp"

namespace hotrow {

// An array in memory that is kept for the next one when nobody has it any more.
inline Array<float> spare_floats(size_t n) {
    auto* kept = new Memory(Spare::get().take(n * sizeof(float)));
    nb::capsule owner(kept, [](void* p) noexcept {
        const std::unique_ptr<Memory> memory(static_cast<Memory*>(p));
        Spare::get().let_go(std::move(*memory));
    });
    return Array<float>(reinterpret_cast<float*>(kept->data()), {n}, owner);
}

inline void bind_spare(nb::module_& m) {
    m.def("spare_floats", &spare_floats, nb::arg("n"));
    m.def("spare_bytes", [] { return Spare::get().bytes(); });
}

}  // namespace hotrow
