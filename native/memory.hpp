// Zeroed memory straight from the system: what is not touched costs nothing. Past a few megabytes it asks for huge pages,
// for random reads over gigabytes are bound by the TLB otherwise.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <utility>

namespace hotrow {

// Asks for a line of a large table, as far as the second cache: the first one has room for few that are on their way, and
// random reads wait for just that.
inline void ask_for(const void* line) { __builtin_prefetch(line, 0, 2); }

class Memory {
public:
    Memory() = default;
    explicit Memory(size_t bytes) : size_(bytes) {
        void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (mapped == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<std::byte*>(mapped);
#ifdef MADV_HUGEPAGE
        if (size_ >= kHuge) madvise(data_, size_, MADV_HUGEPAGE);
#endif
    }
    Memory(Memory&& other) noexcept { *this = std::move(other); }
    Memory& operator=(Memory&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~Memory() {
        if (data_ != nullptr) munmap(data_, size_);
    }

    std::byte* data() const { return data_; }

private:
    static constexpr size_t kHuge = size_t{8} << 20;

    std::byte* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace hotrow
