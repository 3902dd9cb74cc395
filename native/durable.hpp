// What makes the rows of a table whole again after its process was killed at any instruction, and a push that was
// sent again go on where it stopped. It stands in the file `head` of the table's folder, mapped and shared.
//
// At most one record of a part changes at a time, for the part's lock is held. Before it changes it is copied to the
// part's undo image, and the part is armed: `armed` gets the value that its place has, a word that counts the
// keys of the push that are done in this part. One store moves the place on, and that is what makes the change
// count. Whoever opens the folder next finds a part whose place still is the armed one, and puts its image back. Places are
// never equal by chance: each begins with a number that is used once in the life of the table. A killed process
// leaves what its instructions had stored, in their order, so only the compiler must be kept from reordering.
//
// What was altered at rest is found when the folder is opened. Records have sums of their own (part.hpp); what changes once a
// push or less has one sum, right at any time (checked.hpp). A place is stored times an odd number, so that one with a byte altered is none that
// can be; all that stands behind the checked words is summed up when the table is closed, and so is not known after a kill to be
// what it was: the counts of an admission sketch are the only part of it that nothing else watches.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <random>
#include <span>
#include <string>

#include "checked.hpp"
#include "checksum.hpp"
#include "mapped.hpp"

namespace hotrow {

// One push as a journal numbers them; number 0: none.
struct Push {
    uint64_t journal = 0, number = 0;
    uint32_t entry = 0;  // below kPushes; no other unfinished push of the journal has it
};

constexpr size_t kPushes = 128;  // the most that may be unfinished at once

// What is noted of a part beside its undo image: how many rows it has, unless one is just coming or going.
struct Notes {
    uint64_t rows = 0, moves = 0;
};

class Durable {
public:
    static constexpr size_t kParts = 16;
    static constexpr uint32_t kVersion = 2;

    // Opens the folder's head, or makes a new one in its place. `settings` is kept for whoever opens it next.
    Durable(const std::string& folder, bool fresh, const std::string& settings, size_t stride, size_t sketch_bytes)
        : folder_(folder), stride_(stride), sketch_bytes_(sketch_bytes) {
        if (settings.size() > sizeof(Facts::settings)) throw FolderError("The name of the table is too long to be kept in " + folder + ".");
        if (fresh) make(settings);
        file_ = MappedFile(head_path(folder), bytes(), false);
        if (file_.size() < bytes()) refuse(file_.path());
        check_version(head(), file_.path());
        words_ = words_of(head());
        if (!words_.recover()) refuse(file_.path());
        if (facts().stride != stride || facts().sketch_bytes != sketch_bytes) refuse(file_.path());
        if (facts().seal != 0 && facts().seal != seal()) refuse(file_.path());
        check_places();
    }

    ~Durable() {
        if (!is_mine()) return;
        words_.set(facts().seal, seal());
        words_.make_changes();
    }

    static std::string head_path(const std::string& folder) { return folder + "/head"; }

    // The settings a head was made with.
    static std::string settings_in(const std::string& folder) {
        const MappedFile file(head_path(folder), 0, false);
        if (file.size() < sizeof(Head)) refuse(file.path());
        Head& h = *reinterpret_cast<Head*>(file.data());
        check_version(h, file.path());
        if (!words_of(h).recover() || h.facts.settings_bytes > sizeof(h.facts.settings)) refuse(file.path());
        return {h.facts.settings, h.facts.settings_bytes};
    }

    // The rows were found whole: from here on they change, until the table is closed by the process that opened it.
    void begin() {
        words_.set(facts().seal, 0);
        words_.make_changes();
        opened_by_ = getpid();
    }

    bool is_mine() const { return opened_by_ == getpid(); }  // not if it was refused, and not in a forked child

    // How often the table was cleared, and one: names of the files of records have it.
    uint64_t life() const { return facts().life; }
    uint64_t id() const { return facts().id; }  // random: records of another table, or life, are never taken for this one's
    std::string records_prefix() const { return folder_ + "/rows-" + std::to_string(life()) + "-"; }
    std::span<uint8_t> sketch() { return {reinterpret_cast<uint8_t*>(file_.data() + bytes() - sketch_bytes_), sketch_bytes_}; }
    Notes& notes(size_t part) const { return undo_of(part).notes; }

    uint64_t chunks() const { return facts().chunks; }
    void set_chunks(uint64_t chunks) { set(facts().chunks, chunks); }

    uint64_t steps() const {
        std::lock_guard lock(mutex_);
        return facts().steps;
    }

    // Pushes under way belong to the rows as they were, and are void with them.
    void set_steps(uint64_t steps) {
        std::lock_guard lock(mutex_);
        for (Place& p : facts().places)
            if (p.number != 0) words_.set(p.number, 0);
        words_.set(facts().steps, steps);
        words_.make_changes();
    }

    void raise_steps(uint64_t least) {
        std::lock_guard lock(mutex_);
        if (facts().steps >= least) return;
        words_.set(facts().steps, least);
        words_.make_changes();
    }

    // The number of the optimizer step that a change of `keys` keys is, of a push or outside any. A push that comes again has
    // the same one. With `counts` unset the change is none: what a cache writes back, which it has counted already.
    uint64_t next_step(const Push& push, size_t keys, bool counts) {
        if (keys >> kCountBits != 0 && push.number != 0) throw std::invalid_argument("a push has more than 2^24 keys of one table");
        std::lock_guard lock(mutex_);
        Facts& f = facts();
        const uint64_t step = f.steps + counts;
        if (push.number != 0) {
            Place& p = f.places[push.entry];
            if (p.journal == push.journal && p.number == push.number) return p.step;
            words_.set(p.journal, push.journal);
            words_.set(p.number, push.number);
            words_.set(p.mark, f.marks + 1);
            words_.set(p.step, step);
            words_.set(f.marks, f.marks + 1);
        }
        words_.set(f.steps, step);
        words_.make_changes();
        return step;
    }

    // Puts back the record that each part was changing when the process died; at(slot) is where the `size` records are.
    template <class At>
    size_t undo(uint32_t size, At at) {
        size_t undone = 0;
        for (size_t p = 0; p < kParts; ++p) {
            Undo& u = undo_of(p);
            if (u.entry > kOutside) refuse(file_.path());
            if (u.armed == 0 || u.armed != *word(u.entry, p)) continue;
            if (u.slot >= size) refuse(file_.path());
            std::memcpy(at(u.slot), image(p), stride_);
            in_order();
            u.armed = 0;
            ++undone;
        }
        return undone;
    }


private:
    friend class Trail;

    static constexpr uint32_t kOutside = kPushes;  // changes outside any push
    static constexpr uint64_t kOutsideBit = uint64_t{1} << 63;
    static constexpr int kCountBits = 24;

    // How far a push has come is in the words at(e): times kScramble, mark << kCountBits | keys done, or an earlier push's.
    struct Place {
        uint64_t journal, number, mark, step;
    };

    struct Facts {
        uint64_t settings_bytes, id, life, stride, sketch_bytes;
        uint64_t seal, chunks, steps, marks;  // these change
        Place places[kPushes];
        char settings[4096 - 72];
    };

    struct alignas(64) Head {
        char magic[8];
        uint32_t version, unused;
        CheckedWords::Log log;
        Facts facts;
    };

    struct alignas(64) Undo {
        uint64_t armed;    // armed if it equals the place it belongs to
        uint64_t outside;  // the place of changes outside any push, times kScramble
        uint32_t slot, entry;
        Notes notes;
    };
    static_assert(sizeof(Undo) == 64);

    static constexpr char kMagic[9] = "HOTROW-R";

    // A place with any byte altered is that of a push many millions of pushes away.
    static constexpr uint64_t kScramble = 0xD1342543DE82EF95ull;
    static constexpr uint64_t unscramble(uint64_t x) {
        uint64_t inverse = kScramble;  // Newton's way: each round doubles the bits that are right
        for (int k = 0; k < 6; ++k) inverse *= 2 - kScramble * inverse;
        return x * inverse;
    }

    size_t image_bytes() const { return (stride_ + 63) / 64 * 64; }
    size_t bytes() const {
        return sizeof(Head) + kParts * (sizeof(Undo) + image_bytes()) + kPushes * kParts * sizeof(uint64_t) + sketch_bytes_;
    }
    Head& head() const { return *reinterpret_cast<Head*>(file_.data()); }
    Facts& facts() const { return head().facts; }
    std::byte* behind_head() const { return file_.data() + sizeof(Head); }
    Undo& undo_of(size_t p) const { return reinterpret_cast<Undo*>(behind_head())[p]; }
    std::byte* image(size_t p) const { return behind_head() + kParts * sizeof(Undo) + p * image_bytes(); }
    uint64_t* word(uint32_t entry, size_t p) const {
        if (entry == kOutside) return &undo_of(p).outside;
        return reinterpret_cast<uint64_t*>(behind_head() + kParts * (sizeof(Undo) + image_bytes())) + entry * kParts + p;
    }

    static CheckedWords words_of(Head& h) { return {h.log, reinterpret_cast<uint64_t*>(&h.facts), sizeof(Facts) / 8}; }

    void set(uint64_t& word, uint64_t value) {
        std::lock_guard lock(mutex_);
        words_.set(word, value);
        words_.make_changes();
    }

    // Of all that has no sum while the table is open.
    uint64_t seal() const { return weigh(behind_head(), (bytes() - sizeof(Head) + 3) / 4 * 4) | 1; }

    void check_places() const {
        for (size_t p = 0; p < kParts; ++p) {
            if (unscramble(undo_of(p).outside) >> 56 != kOutsideBit >> 56) refuse(file_.path());
            for (uint32_t e = 0; e < kPushes; ++e)
                if (unscramble(*word(e, p)) >> kCountBits > facts().places[e].mark) refuse(file_.path());
        }
    }

    static void check_version(const Head& h, const std::string& path) {
        if (std::memcmp(h.magic, kMagic, 8) != 0) refuse(path);
        if (h.version != kVersion)
            throw FolderError(path + " is of version " + std::to_string(h.version) + "; this release reads version " +
                              std::to_string(kVersion) + ". Restore the table from a snapshot, in another folder.");
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
            if (old.size() >= sizeof(Head)) life = reinterpret_cast<const Head*>(old.data())->facts.life;
        }
        const std::string beside = folder_ + "/.head";
        {
            file_ = MappedFile(beside, bytes(), true);
            file_.grow(bytes());
            std::memcpy(head().magic, kMagic, 8);
            head().version = kVersion;
            Facts& f = facts();
            std::random_device random;
            f.settings_bytes = settings.size();
            f.id = uint64_t{random()} << 32 | random();
            f.life = life + 1;
            f.stride = stride_;
            f.sketch_bytes = sketch_bytes_;
            std::memcpy(f.settings, settings.data(), settings.size());
            for (size_t p = 0; p < kParts; ++p) {
                undo_of(p).outside = kOutsideBit * kScramble;
                undo_of(p).entry = kOutside;
            }
            words_of(head()).begin();
        }
        if (rename(beside.c_str(), head_path(folder_).c_str()) != 0)
            throw FolderError(head_path(folder_) + " cannot be made: " + std::strerror(errno) + ".");
    }

    std::string folder_;
    size_t stride_, sketch_bytes_;
    MappedFile file_;
    CheckedWords words_;
    mutable std::mutex mutex_;  // of the checked words
    pid_t opened_by_ = 0;
};

// Follows one push, or changes outside any, through some parts of a durable table whose locks the caller holds.
class Trail {
public:
    Trail(Durable& durable, const Push& push, size_t first, size_t last)
        : durable_(durable),
          is_push_(push.number != 0),
          burns_(fuse() > 0),
          entry_(is_push_ ? push.entry : Durable::kOutside),
          stride_(durable.stride_),
          image_bytes_(durable.image_bytes()),
          images_(durable.image(0)),
          undos_(&durable.undo_of(0)) {
        if (!is_push_) return;
        mark_ = durable_.facts().places[entry_].mark << Durable::kCountBits;
        for (size_t p = first; p < last; ++p) {
            uint64_t& word = *durable_.word(entry_, p);
            uint64_t at = Durable::unscramble(word);
            if (at >> Durable::kCountBits != mark_ >> Durable::kCountBits) word = (at = mark_) * Durable::kScramble;
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
        word(p) = is_push_ ? (mark_ + seen_[p]) * Durable::kScramble : word(p) + Durable::kScramble;
        in_order();
        burn();
    }

private:
    // A record is a few cache lines: copying it in place beats a call of memcpy. Records are of whole words.
    static void copy_record(std::byte* __restrict to, const std::byte* __restrict from, size_t bytes) {
        size_t at = 0;
        for (; at + 32 <= bytes; at += 32) std::memcpy(to + at, from + at, 32);
        if (at == bytes) return;
        if (bytes >= 32)
            std::memcpy(to + bytes - 32, from + bytes - 32, 32);  // some of it again
        else
            for (; at < bytes; at += 4) std::memcpy(to + at, from + at, 4);
    }

    uint64_t& word(size_t p) const { return is_push_ ? *durable_.word(entry_, p) : undos_[p].outside; }

    void burn() const {
        if (burns_) hotrow::burn();
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
