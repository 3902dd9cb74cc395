// The records of one table, of one size each, numbered by slot. A record never moves, so a slot is as good as an
// address, and growing copies nothing. Memory is taken in segments of address space, of which only what is used
// costs anything; past the first two megabytes it is in huge pages, for random rows are bound by the TLB otherwise.
#pragma once

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>

namespace hotrow {

class Records {
public:
    static constexpr uint32_t kChunk = 64;  // slots are handed out in chunks, so that parts seldom meet here

    Records() = default;
    Records(const Records&) = delete;
    Records& operator=(const Records&) = delete;
    ~Records() {
        for (std::byte* segment : *segments_)
            if (segment != nullptr) munmap(segment, segment_bytes());
    }

    void open(size_t stride) { stride_ = stride; }

    size_t stride() const { return stride_; }
    uint32_t size() const { return size_.load(std::memory_order_acquire); }
    std::byte* at(uint32_t slot) const {
        return (*segments_)[slot >> kSegmentBits] + (slot & (kSegmentSlots - 1)) * stride_;
    }

    // The first of kChunk new slots in a row, all zeros.
    uint32_t new_chunk() {
        std::lock_guard lock(mutex_);
        const uint32_t first = size_.load(std::memory_order_relaxed);
        if (first > 0xFFFFFFFF - 2 * kChunk) throw std::length_error("a table has 2^32 rows in one process; it can hold no more");
        std::byte*& segment = (*segments_)[first >> kSegmentBits];
        if (segment == nullptr) segment = map(first == 0 ? kHugePage : 0);
        size_.store(first + kChunk, std::memory_order_release);
        return first;
    }

private:
    static constexpr uint32_t kSegmentBits = 20, kSegmentSlots = 1u << kSegmentBits;
    static constexpr size_t kHugePage = size_t{2} << 20;

    size_t segment_bytes() const { return (kSegmentSlots * stride_ + kHugePage - 1) / kHugePage * kHugePage; }

    // A segment in huge pages but for its first `plain` bytes: a small table should not cost one.
    std::byte* map(size_t plain) const {
        const size_t bytes = segment_bytes();
        void* wide = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (wide == MAP_FAILED) throw std::bad_alloc();
        const auto address = reinterpret_cast<uintptr_t>(wide);
        const uintptr_t aligned = (address + kHugePage - 1) / kHugePage * kHugePage;
        if (aligned > address) munmap(wide, aligned - address);
        if (aligned < address + kHugePage) munmap(reinterpret_cast<void*>(aligned + bytes), address + kHugePage - aligned);
        auto* segment = reinterpret_cast<std::byte*>(aligned);
#ifdef MADV_HUGEPAGE
        madvise(segment + plain, bytes - plain, MADV_HUGEPAGE);
#endif
        return segment;
    }

    size_t stride_ = 0;
    std::mutex mutex_;
    std::atomic<uint32_t> size_{0};
    std::unique_ptr<std::array<std::byte*, 4096>> segments_ = std::make_unique<std::array<std::byte*, 4096>>();
};

}  // namespace hotrow
