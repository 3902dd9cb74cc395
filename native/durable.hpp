// What makes the rows of a table whole again after its process was killed at any instruction, and a push that was
// sent again go on where it stopped. It stands in the file `head` of the table's folder, mapped and shared.
//
// At most one record of a part changes at a time, for the part's lock is held. Before it changes it is copied to the
// part's undo image, and the part is armed: `armed` gets the value that its place has, a word that counts the
// keys of the push that are done in this part. One store moves the place on, and that is what makes the change
// count. Whoever opens the folder next finds a part whose place still is the armed one, and puts its image back. Places are
// never equal by chance: each begins with a number that is used once in the life of the table. A killed process
// leaves what its instructions had stored, in their order, so only the compiler must be kept from reordering.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <span>
#include <string>

#include "mapped.hpp"

namespace hotrow {

// One push as a journal numbers them; number 0: none.
struct Push {
    uint64_t journal = 0, number = 0;
    uint32_t entry = 0;  // below kPushes; no other unfinished push of the journal has it
};

constexpr size_t kPushes = 128;  // the most that may be unfinished at once

// For the compiler alone: what stands before it is stored before what stands behind.
inline void in_order() { std::atomic_signal_fence(std::memory_order_seq_cst); }

class Durable {
public:
    static constexpr size_t kParts = 16;
    static constexpr uint32_t kVersion = 1;

    // Opens the folder's head, or makes a new one in its place. `settings` is kept for whoever opens it next.
    Durable(const std::string& folder, bool fresh, const std::string& settings, size_t stride, size_t sketch_bytes)
        : folder_(folder), stride_(stride), sketch_bytes_(sketch_bytes) {
        if (settings.size() > sizeof(Head::settings)) throw FolderError("The name of the table is too long to be kept in " + folder + ".");
        if (fresh) make(settings);
        file_ = MappedFile(head_path(folder), bytes(), false);
        if (file_.size() < bytes()) refuse(file_.path());
        check(head(), file_.path());
        if (head().stride != stride || head().sketch_bytes != sketch_bytes) refuse(file_.path());
        if (const char* steps = std::getenv("HOTROW_DIE_AFTER"); steps != nullptr) fuse_ = std::atoll(steps);
    }

    static std::string head_path(const std::string& folder) { return folder + "/head"; }

    // The settings a head was made with.
    static std::string settings_in(const std::string& folder) {
        const MappedFile file(head_path(folder), 0, false);
        if (file.size() < sizeof(Head)) refuse(file.path());
        const Head& h = *reinterpret_cast<const Head*>(file.data());
        check(h, file.path());
        return {h.settings, h.settings_bytes};
    }

    // How often the table was cleared, and one: names of the files of records have it.
    uint64_t life() const { return head().life; }
    std::string records_prefix() const { return folder_ + "/rows-" + std::to_string(life()) + "-"; }
    uint64_t& segments() { return head().segments; }
    std::span<uint8_t> sketch() { return {reinterpret_cast<uint8_t*>(file_.data() + bytes() - sketch_bytes_), sketch_bytes_}; }

    uint64_t steps() const {
        std::lock_guard lock(mutex_);
        return head().steps;
    }

    // Pushes under way belong to the rows as they were, and are void with them.
    void set_steps(uint64_t steps) {
        std::lock_guard lock(mutex_);
        for (size_t e = 0; e < kPushes; ++e) place(e).number = 0;
        in_order();
        head().steps = steps;
    }

    void raise_steps(uint64_t least) {
        std::lock_guard lock(mutex_);
        head().steps = std::max(head().steps, least);
    }

    // The number of the optimizer step that a change of `keys` keys is, of a push or outside any. A push that comes again has
    // the same one. With `counts` unset the change is none: what a cache writes back, which it has counted already.
    uint64_t next_step(const Push& push, size_t keys, bool counts) {
        if (keys >> kCountBits != 0 && push.number != 0) throw std::invalid_argument("a push has more than 2^24 keys of one table");
        std::lock_guard lock(mutex_);
        const uint64_t step = head().steps + counts;
        if (push.number != 0) {
            Place& p = place(push.entry);
            if (p.journal == push.journal && p.number == push.number) return p.step;
            p.number = 0;
            in_order();
            p.journal = push.journal;
            p.mark = ++head().marks;
            p.step = step;
            in_order();
            p.number = push.number;
            in_order();
        }
        return head().steps = step;
    }

    // Puts back the record that each part was changing when the process died; at(slot) is where the `size` records are.
    template <class At>
    size_t undo(uint32_t size, At at) {
        size_t undone = 0;
        for (size_t p = 0; p < kParts; ++p) {
            Undo& u = undo_of(p);
            if (u.armed == 0 || u.armed != *word(u.entry, p)) continue;
            if (u.slot >= size || u.entry > kOutside) refuse(file_.path());
            std::memcpy(at(u.slot), image(p), stride_);
            in_order();
            u.armed = 0;
            ++undone;
        }
        Head& h = head();  // the step of a push may have been noted and not yet counted
        for (size_t e = 0; e < kPushes; ++e)
            if (place(e).number != 0) h.steps = std::max(h.steps, place(e).step);
        return undone;
    }

private:
    friend class Trail;

    static constexpr uint32_t kOutside = kPushes;  // changes outside any push
    static constexpr uint64_t kOutsideBit = uint64_t{1} << 63;
    static constexpr int kCountBits = 24;

    struct Head {
        char magic[8];
        uint32_t version, settings_bytes;
        uint64_t check;  // of the settings
        uint64_t life, stride, sketch_bytes;
        uint64_t segments, steps, marks;  // these change
        char settings[4096 - 72];
    };
    static_assert(sizeof(Head) == 4096);

    struct alignas(64) Undo {
        uint64_t armed;    // armed if it equals the place it belongs to
        uint64_t outside;  // the place of changes outside any push
        uint32_t slot, entry;
    };

    // How far a push has come. `at` of a part is mark << kCountBits | keys done, or an earlier push's.
    struct Place {
        uint64_t journal, number, mark, step;
        uint64_t at[kParts];
    };

    static constexpr char kMagic[9] = "HOTROW-R";

    size_t image_bytes() const { return (stride_ + 63) / 64 * 64; }
    size_t bytes() const {
        return sizeof(Head) + kParts * (sizeof(Undo) + image_bytes()) + kPushes * sizeof(Place) + sketch_bytes_;
    }
    Head& head() const { return *reinterpret_cast<Head*>(file_.data()); }
    std::byte* behind_head() const { return file_.data() + sizeof(Head); }
    Undo& undo_of(size_t p) const { return reinterpret_cast<Undo*>(behind_head())[p]; }
    std::byte* image(size_t p) const { return behind_head() + kParts * sizeof(Undo) + p * image_bytes(); }
    Place& place(size_t e) const {
        return reinterpret_cast<Place*>(behind_head() + kParts * (sizeof(Undo) + image_bytes()))[e];
    }
    uint64_t* word(uint32_t entry, size_t p) const {
        if (entry < kPushes) return &place(entry).at[p];
        return &undo_of(p).outside;
    }

    static uint64_t sum(const char* text, size_t n) {
        uint64_t state = 0xCBF29CE484222325ull;
        for (size_t i = 0; i < n; ++i) state = (state ^ static_cast<uint8_t>(text[i])) * 0x100000001B3ull;
        return state;
    }

    static void check(const Head& h, const std::string& path) {
        if (std::memcmp(h.magic, kMagic, 8) != 0) refuse(path);
        if (h.version != kVersion)
            throw FolderError(path + " is of version " + std::to_string(h.version) + "; this release reads version " +
                              std::to_string(kVersion) + ".");
        if (h.settings_bytes > sizeof(h.settings) || sum(h.settings, h.settings_bytes) != h.check) refuse(path);
    }

    [[noreturn]] static void refuse(const std::string& path) {
        throw FolderError(path + " is truncated or altered: it is not the head of a table's rows. "
                                 "Restore the table from a snapshot, in another folder.");
    }

    // Beside its place first, so that there is a whole head at any time.
    void make(const std::string& settings) {
        uint64_t life = 0;
        if (access(head_path(folder_).c_str(), F_OK) == 0) {
            const MappedFile old(head_path(folder_), 0, false);
            if (old.size() >= sizeof(Head)) life = reinterpret_cast<const Head*>(old.data())->life;
        }
        const std::string beside = folder_ + "/.head";
        {
            MappedFile file(beside, bytes(), true);
            file.grow(bytes());
            Head& h = *reinterpret_cast<Head*>(file.data());
            std::memcpy(h.magic, kMagic, 8);
            h.version = kVersion;
            h.settings_bytes = static_cast<uint32_t>(settings.size());
            h.check = sum(settings.data(), settings.size());
            h.life = life + 1;
            h.stride = stride_;
            h.sketch_bytes = sketch_bytes_;
            std::memcpy(h.settings, settings.data(), settings.size());
            auto* undo = reinterpret_cast<Undo*>(file.data() + sizeof(Head));
            for (size_t p = 0; p < kParts; ++p) {
                undo[p].outside = kOutsideBit;
                undo[p].entry = kOutside;
            }
        }
        if (rename(beside.c_str(), head_path(folder_).c_str()) != 0)
            throw FolderError(head_path(folder_) + " cannot be made: " + std::strerror(errno) + ".");
    }

    // For tests: HOTROW_DIE_AFTER=n kills the process at the n-th of the steps below that a Trail takes.
    void burn() {
        if (fuse_.fetch_sub(1) == 1) kill(getpid(), SIGKILL);
    }

    std::string folder_;
    size_t stride_, sketch_bytes_;
    MappedFile file_;
    mutable std::mutex mutex_;  // of steps and of whose each place is
    std::atomic<int64_t> fuse_{0};
};

// Follows one push, or changes outside any, through some parts of a durable table whose locks the caller holds.
class Trail {
public:
    Trail(Durable& durable, const Push& push, size_t first, size_t last)
        : durable_(durable),
          is_push_(push.number != 0),
          burns_(durable.fuse_.load() > 0),
          entry_(is_push_ ? push.entry : Durable::kOutside),
          stride_(durable.stride_),
          image_bytes_(durable.image_bytes()),
          images_(durable.image(0)),
          undos_(&durable.undo_of(0)) {
        if (!is_push_) return;
        mark_ = durable_.place(entry_).mark << Durable::kCountBits;
        for (size_t p = first; p < last; ++p) {
            uint64_t& at = *durable_.word(entry_, p);
            if (at >> Durable::kCountBits != mark_ >> Durable::kCountBits) at = mark_;
            done_[p] = at - mark_;
        }
    }

    // Goes to the part's next key: whether its change was made before the push came again.
    bool passes(size_t p) { return is_push_ && seen_[p]++ < done_[p]; }

    // Before a record changes: copies it, then arms the part. Between the two may stand what can fail.
    void save(size_t p, uint32_t slot, const std::byte* record) {
        burn();
        copy_record(images_ + p * image_bytes_, record, stride_);
        undos_[p].slot = slot;
        undos_[p].entry = entry_;
        in_order();
        burn();
    }

    // From here to `commit` the record may change, and nothing may fail.
    void arm(size_t p) {
        in_order();
        undos_[p].armed = word(p);
        in_order();
        burn();
    }

    void commit(size_t p) {
        burn();
        in_order();
        word(p) = is_push_ ? mark_ + seen_[p] : word(p) + 1;
        in_order();
        burn();
    }

private:
    // A record is a few cache lines: copying it in place beats a call of memcpy. Records are of whole words.
    static void copy_record(std::byte* __restrict to, const std::byte* __restrict from, size_t bytes) {
        size_t at = 0;
        for (; at + 32 <= bytes; at += 32) std::memcpy(to + at, from + at, 32);
        for (; at < bytes; at += 4) std::memcpy(to + at, from + at, 4);
    }

    uint64_t& word(size_t p) const { return is_push_ ? *durable_.word(entry_, p) : undos_[p].outside; }

    void burn() {
        if (burns_) durable_.burn();
    }

    Durable& durable_;
    const bool is_push_, burns_;
    const uint32_t entry_;
    const size_t stride_, image_bytes_;
    std::byte* const images_;
    Durable::Undo* const undos_;
    uint64_t mark_ = 0;
    uint64_t seen_[Durable::kParts] = {}, done_[Durable::kParts] = {};
};

}  // namespace hotrow
