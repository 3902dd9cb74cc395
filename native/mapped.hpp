// A file in memory, shared with the page cache: what is written to it is there for whoever opens it next, also when the
// writer is killed at any instruction. It is not there after the machine stops, for nothing is flushed.
//
// Space is taken before it is used, so a full disk is an error here and never a signal later; a file that is opened is given what
// it lacks, for its process may have been killed when it had grown and had no space yet. On tmpfs the memory is
// collapsed into huge pages whatever the mount says, as random rows are bound by the TLB otherwise; on a disk's file system the
// kernel refuses that, and random rows cost more.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "memory.hpp"

namespace hotrow {

// For the compiler alone: what stands before it is stored before what stands behind. A killed process leaves what its
// instructions had stored, in their order.
inline void in_order() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// What a user can mend: a folder that is full, unreadable or not what it should be. Its message is a sentence.
struct FolderError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class MappedFile {
public:
    MappedFile() = default;
    // `room` is how long the file may become, 0 as long as it is; only what it is long now can be touched.
    MappedFile(const std::string& path, size_t room, bool create) : path_(path) {
        file_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC | (create ? O_CREAT | O_TRUNC : 0), 0600);
        if (file_ < 0) fail("cannot be opened");
        struct stat found {};
        if (fstat(file_, &found) != 0) fail("cannot be read");
        size_ = static_cast<size_t>(found.st_size);
        room_ = ((room == 0 ? size_ : room) + kHugePage - 1) / kHugePage * kHugePage;
        room_ = std::max(room_, kHugePage);
        if (size_ > room_) refuse("is longer than it can be: it is not what was written there.");
        fill_holes();
        map();
    }
    MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }
    MappedFile& operator=(MappedFile&& other) noexcept {
        std::swap(path_, other.path_);
        std::swap(file_, other.file_);
        std::swap(data_, other.data_);
        std::swap(room_, other.room_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~MappedFile() {
        if (data_ != nullptr) munmap(data_, room_);
        if (file_ >= 0) ::close(file_);
    }

    std::byte* data() const { return data_; }
    size_t size() const { return size_; }
    const std::string& path() const { return path_; }

    // Makes the file at least this long, zeros at the end, with space of its own. A large one grows by more at a time.
    void grow(size_t bytes) {
        if (bytes <= size_) return;
        size_t to = std::max(bytes, std::min(size_ + size_ / 4, size_ + kMostGrowth));
        to = to < kHugePage ? (to + kPage - 1) / kPage * kPage : (to + kHugePage - 1) / kHugePage * kHugePage;
        to = std::min(to, room_);
        const size_t from = size_ >= kHugePage ? size_ : 0;
        if (ftruncate(file_, static_cast<off_t>(to)) != 0) fail("cannot grow");
        for (size_t at = from; at + kHugePage <= to; at += kHugePage) collapse(at);
        take(size_, to - size_);
        size_ = to;
    }

private:
    static constexpr size_t kPage = size_t{64} << 10, kMostGrowth = size_t{32} << 20;

    void map() {
        std::byte* to = nullptr;
        try {
            to = map_aligned(room_, PROT_NONE);
        } catch (const std::bad_alloc&) {
            fail("cannot be mapped");
        }
        if (mmap(to, room_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_, 0) == MAP_FAILED) {
            munmap(to, room_);
            fail("cannot be mapped");
        }
        data_ = to;
    }

    // Sees that bytes at the end of the file, zeros so far, have space of their own.
    void take(size_t from, size_t bytes) {
        int error = allocate(from, bytes);
        if (error == 0) return;
        if (ftruncate(file_, static_cast<off_t>(size_)) != 0) error = errno;
        refuse("has no space for " + std::to_string((bytes + 1023) >> 10) + " KiB more: " + std::strerror(error) +
               ". Make room on its file system, or give another folder.");
    }

    void fill_holes() {
        const int error = size_ == 0 ? 0 : allocate(0, size_);
        if (error == 0) return;
        refuse("lacks space for some of its " + std::to_string((size_ + 1023) >> 10) + " KiB: " + std::strerror(error) +
               ". Make room on its file system and try again.");
    }

    // Keeps what is there.
    int allocate(size_t from, size_t bytes) const {
#ifdef __APPLE__
        for (size_t at = from; at < from + bytes; at += 4096) {
            char byte = 0;
            if (pread(file_, &byte, 1, static_cast<off_t>(at)) < 0) return errno;
            if (pwrite(file_, &byte, 1, static_cast<off_t>(at)) != 1) return errno == 0 ? ENOSPC : errno;
        }
        return 0;
#else
        int error = 0;
        do error = posix_fallocate(file_, static_cast<off_t>(from), static_cast<off_t>(bytes));
        while (error == EINTR);
        return error;
#endif
    }

    // One page must be there for the kernel to make the rest of its huge page around it.
    void collapse([[maybe_unused]] size_t at) {
#ifdef __linux__
#ifndef MADV_COLLAPSE
        constexpr int MADV_COLLAPSE = 25;
#endif
        if (!collapses_) return;
        if (at >= size_) take(at, 4096);
        (void)*static_cast<volatile std::byte*>(data_ + at);
        collapses_ = madvise(data_ + at, kHugePage, MADV_COLLAPSE) == 0;
#endif
    }

    [[noreturn]] void fail(const std::string& what) { refuse(what + ": " + std::strerror(errno) + "."); }

    [[noreturn]] void refuse(const std::string& what) {
        if (data_ == nullptr && file_ >= 0) ::close(file_);  // in the constructor: no destructor will run
        throw FolderError(path_ + " " + what);
    }

    std::string path_;
    int file_ = -1;
    std::byte* data_ = nullptr;
    size_t room_ = 0, size_ = 0;
    bool collapses_ = true;
};

}  // namespace hotrow
