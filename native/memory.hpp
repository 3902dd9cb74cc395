// Zeroed memory straight from the system: what is not touched costs nothing. From a megabyte on it is in huge pages, for
// random reads over many pages are bound by the TLB otherwise.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

namespace hotrow {

// Asks for a line of a large table, as far as the second cache: the first one has room for few that are on their way, and
// random reads wait for just that.
inline void ask_for(const void* line) { __builtin_prefetch(line, 0, 2); }

constexpr size_t kHugePage = size_t{2} << 20;

// So many bytes of address space from a multiple of a huge page on, nothing of it used yet.
inline std::byte* map_aligned(size_t bytes, int protection = PROT_READ | PROT_WRITE) {
    void* wide = mmap(nullptr, bytes + kHugePage, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (wide == MAP_FAILED) throw std::bad_alloc();
    const auto address = reinterpret_cast<uintptr_t>(wide);
    const uintptr_t aligned = (address + kHugePage - 1) / kHugePage * kHugePage;
    if (aligned > address) munmap(wide, aligned - address);
    if (aligned < address + kHugePage) munmap(reinterpret_cast<void*>(aligned + bytes), address + kHugePage - aligned);
    return reinterpret_cast<std::byte*>(aligned);
}

class Memory {
public:
    Memory() = default;
    explicit Memory(size_t bytes) : size_(bytes < kLeast ? bytes : (bytes + kHugePage - 1) / kHugePage * kHugePage) {
        if (size_ == 0) return;
        if (size_ < kHugePage) {
            void* mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (mapped == MAP_FAILED) throw std::bad_alloc();
            data_ = static_cast<std::byte*>(mapped);
            return;
        }
        data_ = map_aligned(size_);
#ifdef MADV_HUGEPAGE
        madvise(data_, size_, MADV_HUGEPAGE);
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
    size_t size() const { return size_; }

private:
    static constexpr size_t kLeast = size_t{1} << 20;

    std::byte* data_ = nullptr;
    size_t size_ = 0;
};

// Memory for the parts of a table, which ask for about as much as each other and for more each time. Theirs lies side by
// side, so that huge pages are worth it; it is given back when no part has any of it.
class Shelf {
public:
    static constexpr size_t kParts = 16;

    std::shared_ptr<std::byte> take(size_t part, size_t bytes) {
        std::lock_guard lock(mutex_);
        if (board_ == nullptr || board_->each < bytes) board_ = std::make_shared<Board>(bytes);
        if (board_->each > bytes || board_->taken[part]) {  // a part that lags far behind the others
            auto own = std::make_shared<Memory>(bytes);
            return {own, own->data()};
        }
        board_->taken[part] = true;
        return {board_, board_->memory.data() + part * bytes};
    }

private:
    struct Board {
        explicit Board(size_t bytes) : memory(kParts * bytes), each(bytes) {}
        Memory memory;
        size_t each;
        bool taken[kParts] = {};
    };

    std::mutex mutex_;
    std::shared_ptr<Board> board_;
};

}  // namespace hotrow
