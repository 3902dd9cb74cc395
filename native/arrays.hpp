// NumPy arrays as the native core takes and gives them: C-contiguous, on the host, never copied on the way.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <memory>
#include <utility>
#include <vector>

namespace hotrow {

namespace nb = nanobind;

template <class T>
using In = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutMatrix = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using InMatrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <class T>
Array<T> view(T* data, size_t n, nb::handle owner) {
    return Array<T>(data, {n}, owner);
}

// Moves a vector into a NumPy array that owns it.
template <class T>
Array<T> give(std::vector<T>&& from) {
    auto* kept = new std::vector<T>(std::move(from));
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return Array<T>(kept->data(), {kept->size()}, owner);
}

// Gives memory made by C++ to a NumPy array of its first `n` values.
template <class T>
Array<T> give(std::unique_ptr<T[]>&& from, size_t n) {
    T* data = from.release();
    nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return Array<T>(data, {n}, owner);
}

}  // namespace hotrow
