// A growing array of bytes whose untouched end costs no memory, and which grows without copying (Linux: mremap).
// Past a few megabytes it asks for huge pages: random rows in gigabytes are bound by the TLB otherwise.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>

namespace hotrow {

class Memory {
public:
    Memory() = default;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    Memory(Memory&& other) noexcept { swap(other); }
    Memory& operator=(Memory&& other) noexcept {
        swap(other);
        return *this;
    }
    ~Memory() {
        if (data_ != nullptr) munmap(data_, size_);
    }

    std::byte* data() const { return data_; }
    size_t size() const { return size_; }

    // Makes room for at least `bytes`, filled with zeros where it is new. Addresses change; throws std::bad_alloc.
    void reserve(size_t bytes) {
        if (bytes <= size_) return;
        bytes = (std::max(bytes, 2 * size_) + kPage - 1) / kPage * kPage;
        void* grown = data_ == nullptr ? map(bytes) : grow(bytes);
        if (grown == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<std::byte*>(grown);
        size_ = bytes;
#ifdef MADV_HUGEPAGE
        if (size_ >= kHuge) madvise(data_, size_, MADV_HUGEPAGE);
#endif
    }

private:
    static constexpr size_t kPage = 4096, kHuge = size_t{8} << 20;

    static void* map(size_t bytes) {
        return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }

    void* grow(size_t bytes) {
#ifdef __linux__
        return mremap(data_, size_, bytes, MREMAP_MAYMOVE);
#else
        void* fresh = map(bytes);
        if (fresh == MAP_FAILED) return fresh;
        std::memcpy(fresh, data_, size_);
        munmap(data_, size_);
        return fresh;
#endif
    }

    void swap(Memory& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
    }

    std::byte* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace hotrow
