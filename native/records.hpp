// The records of one table, of one size each, numbered by slot. A record never moves, so a slot is as good as an
// address, and growing copies nothing. Memory is taken in segments of address space, of which only what is used
// costs anything; past the first two megabytes it is in huge pages, for random rows are bound by the TLB otherwise.
//
// With a folder a segment is a file: a byte for each of its chunks that says which part the chunk belongs to, then the
// records. Whoever opens the folder next finds the same records in the same slots; how many chunks are in use stands in the head.
#pragma once

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "mapped.hpp"
#include "memory.hpp"

namespace hotrow {

class Records {
public:
    static constexpr uint32_t kChunk = 64;  // slots are handed out in chunks, so that parts seldom meet here

    Records() = default;
    Records(const Records&) = delete;
    Records& operator=(const Records&) = delete;
    ~Records() {
        if (!files_prefix_.empty()) return;
        for (std::byte* segment : *segments_)
            if (segment != nullptr) munmap(segment, segment_bytes());
    }

    void open(size_t stride) { stride_ = stride; }

    // In files whose names begin so. `chunks` are in use already; keep_chunks(chunks) keeps how many there are now.
    void open(size_t stride, const std::string& prefix, uint64_t chunks, std::function<void(uint64_t)> keep_chunks) {
        stride_ = stride;
        files_prefix_ = prefix;
        keep_chunks_ = std::move(keep_chunks);
        if (chunks > (uint64_t{1} << 32) / kChunk) throw FolderError(prefix + "* cannot hold as many rows as are said to be there.");
        for (uint64_t k = 0; k < (chunks + kOwners - 1) / kOwners; ++k) add_file(false);
        size_ = static_cast<uint32_t>(chunks * kChunk);
    }

    size_t stride() const { return stride_; }
    uint32_t size() const { return size_.load(std::memory_order_acquire); }
    std::byte* at(uint32_t slot) const {
        return (*segments_)[slot >> kSegmentBits] + (slot & (kSegmentSlots - 1)) * stride_;
    }

    // The first of kChunk new slots in a row, all zeros, for a part.
    uint32_t new_chunk(size_t part) {
        std::lock_guard lock(mutex_);
        const uint32_t first = size_.load(std::memory_order_relaxed);
        if (first > 0xFFFFFFFF - 2 * kChunk) throw std::length_error("a table has 2^32 rows in one process; it can hold no more");
        if (files_prefix_.empty()) {
            std::byte*& segment = (*segments_)[first >> kSegmentBits];
            if (segment == nullptr) segment = map(first == 0 ? kHugePage : 0);
        } else {
            if (files_.size() <= first >> kSegmentBits) add_file(true);
            MappedFile& file = files_.back();
            file.grow(kOwners + ((first & (kSegmentSlots - 1)) + kChunk) * stride_);
            owner(first) = static_cast<uint8_t>(part + 1);
            in_order();
            keep_chunks_(first / kChunk + 1);
        }
        size_.store(first + kChunk, std::memory_order_release);
        return first;
    }

    // The first slots of each part's chunks as the files have them.
    std::vector<std::vector<uint32_t>> find_chunks(size_t parts) {
        std::vector<std::vector<uint32_t>> found(parts);
        for (uint32_t slot = 0; slot < size(); slot += kChunk) {
            const MappedFile& file = files_[slot >> kSegmentBits];
            const uint8_t whose = owner(slot);
            if (whose == 0 || whose > parts || file.size() < kOwners + ((slot & (kSegmentSlots - 1)) + kChunk) * stride_) refuse(file);
            found[whose - 1].push_back(slot);
        }
        return found;
    }

    [[noreturn]] void refuse(uint32_t slot) const {
        if (files_.empty()) refuse(files_prefix_ + "*");
        refuse(files_[slot >> kSegmentBits]);
    }

    // The name of a segment's file.
    static std::string file_name(const std::string& prefix, uint64_t segment) {
        char number[24];
        std::snprintf(number, sizeof number, "%04u", static_cast<unsigned>(segment));
        return prefix + number;
    }

private:
    static constexpr uint32_t kSegmentBits = 20, kSegmentSlots = 1u << kSegmentBits;
    static constexpr size_t kOwners = kSegmentSlots / kChunk;

    size_t segment_bytes() const { return (kSegmentSlots * stride_ + kHugePage - 1) / kHugePage * kHugePage; }

    uint8_t& owner(uint32_t slot) const {
        const auto* file = files_[slot >> kSegmentBits].data();
        return *reinterpret_cast<uint8_t*>(const_cast<std::byte*>(file) + (slot & (kSegmentSlots - 1)) / kChunk);
    }

    [[noreturn]] static void refuse(const MappedFile& file) { refuse(file.path()); }
    [[noreturn]] static void refuse(const std::string& path) {
        throw FolderError(path + " is truncated or altered: it does not hold the rows it says it does. "
                                        "Restore the table from a snapshot, in another folder.");
    }

    void add_file(bool create) {
        const std::string name = file_name(files_prefix_, files_.size());
        if (!create && access(name.c_str(), F_OK) != 0)
            throw FolderError(name + " is not there, but its folder's head says that it holds rows. Put it back, or restore the "
                                     "table from a snapshot, in another folder.");
        MappedFile file(name, kOwners + kSegmentSlots * stride_, create);
        if (create)
            file.grow(kOwners);
        else if (file.size() < kOwners)
            refuse(file);
        (*segments_)[files_.size()] = file.data() + kOwners;
        files_.push_back(std::move(file));
    }

    // A segment in huge pages but for its first `plain` bytes: a small table should not cost one.
    std::byte* map(size_t plain) const {
        const size_t bytes = segment_bytes();
        std::byte* segment = map_aligned(bytes);
#ifdef MADV_HUGEPAGE
        madvise(segment + plain, bytes - plain, MADV_HUGEPAGE);
#endif
        return segment;
    }

    size_t stride_ = 0;
    std::mutex mutex_;
    std::atomic<uint32_t> size_{0};
    std::unique_ptr<std::array<std::byte*, 4096>> segments_ = std::make_unique<std::array<std::byte*, 4096>>();
    std::string files_prefix_;  // empty: in plain memory
    std::function<void(uint64_t)> keep_chunks_;
    std::vector<MappedFile> files_;
};

}  // namespace hotrow
