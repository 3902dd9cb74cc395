// Which pushes were applied, in a mapped file, so that one that is sent again is applied once, whatever was killed between.
//
// A push is named by its client and the client's sequence number. For each client the last sequence numbers done
// stand in a ring, a number s at s % kWindow: one change makes a push done, and a client may have kWindow of them under
// way in any order. A push that has begun has an entry; one that a killed process left keeps its number, by which each
// table knows how far it got (durable.hpp).
//
// Of kClients clients the pushes are known. One more takes the place of the client that was silent longest, of which only
// the name is kept: it is refused when it comes back, for nobody knows what of its pushes was applied. When kForgotten names are
// kept, no new client is taken. So no push is ever applied twice.
//
// All of it has one sum, right at any time (checked.hpp).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <unordered_set>
#include <vector>

#include "checked.hpp"
#include "durable.hpp"
#include "mapped.hpp"

namespace hotrow {

using ClientId = std::array<uint8_t, 16>;

struct Sent {
    ClientId client;
    uint64_t sequence;
};

// A push that begins is being applied at this moment, by another thread.
struct UnderWay : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Journal {
public:
    static constexpr size_t kClients = 1024, kWindow = 64, kForgotten = 1 << 16;

    explicit Journal(const std::string& path) {
        if (access(path.c_str(), F_OK) != 0) make(path);
        file_ = MappedFile(path, sizeof(File), false);
        if (file_.size() < sizeof(File) || std::memcmp(file().magic, kMagic, 8) != 0) refuse(path);
        if (file().version != kVersion)
            throw FolderError(path + " is of version " + std::to_string(file().version) + "; this release reads version " +
                              std::to_string(kVersion) + ". Restore the tables from a snapshot and give another folder.");
        words_ = words_of(file());
        if (!words_.recover()) refuse(path);
        for (uint32_t c = 0; c < kClients; ++c)
            if (facts().clients[c].state != kUnknown) clients_[facts().clients[c].id()] = c;
        forgotten_.insert(facts().forgotten, facts().forgotten + facts().forgotten_count);
    }

    // A push to apply, or one of number 0 if it was applied already.
    Push begin(const Sent& sent) {
        std::lock_guard lock(mutex_);
        if (is_done(sent)) return {};
        Entry* e = find(sent);
        if (e == nullptr) e = take(sent);
        const auto number = static_cast<uint32_t>(e - facts().entries);
        if (active_[number]) throw UnderWay("the push is being applied");
        active_[number] = true;
        return {facts().id, e->number, number};
    }

    bool was_applied(const Sent& sent) {
        std::lock_guard lock(mutex_);
        return is_done(sent);
    }

    // The push was applied in full.
    void done(const Push& push) {
        std::lock_guard lock(mutex_);
        Entry& e = entry_of(push);
        uint64_t& applied = applied_at(e);
        words_.set(applied, std::max(applied, e.sequence + 1));
        words_.set(e.state, kFree);
        words_.make_changes();
        active_[push.entry] = false;
    }

    // The push failed on its way: it goes on when it comes again.
    void release(const Push& push) {
        std::lock_guard lock(mutex_);
        entry_of(push);
        active_[push.entry] = false;
    }

    // The push was refused before anything of it was applied: its entry is for others.
    void drop(const Push& push) {
        std::lock_guard lock(mutex_);
        words_.set(entry_of(push).state, kFree);
        words_.make_changes();
        active_[push.entry] = false;
    }

    // How many pushes were begun and are not done.
    size_t unfinished() {
        std::lock_guard lock(mutex_);
        const auto& entries = facts().entries;
        return static_cast<size_t>(
            std::count_if(std::begin(entries), std::end(entries), [](const Entry& e) { return e.state == kBegun; }));
    }

private:
    enum State : uint64_t { kFree = 0, kBegun = 1 };
    enum Acquaintance : uint64_t { kUnknown = 0, kKnown = 1, kGivenUp = 2 };

    struct Client {
        uint64_t name[2];
        uint64_t state;
        uint64_t last;              // number of its last push
        uint64_t applied[kWindow];  // sequence + 1

        ClientId id() const {
            ClientId out;
            std::memcpy(out.data(), name, sizeof name);
            return out;
        }
    };
    struct Entry {
        uint64_t number, sequence, client, state;
    };
    struct Facts {
        uint64_t id;       // random: numbers of two journals are never taken for each other
        uint64_t numbers;  // given so far
        Client clients[kClients];
        Entry entries[kPushes];
        uint64_t forgotten_count;
        uint64_t forgotten[kForgotten];  // hashes of names
    };
    struct File {
        char magic[8];
        uint32_t version, unused;
        CheckedWords::Log log;
        Facts facts;
    };

    static constexpr char kMagic[9] = "HOTROW-J";
    static constexpr uint32_t kVersion = 2;

    File& file() const { return *reinterpret_cast<File*>(file_.data()); }
    Facts& facts() const { return file().facts; }
    static CheckedWords words_of(File& f) { return {f.log, reinterpret_cast<uint64_t*>(&f.facts), sizeof(Facts) / 8}; }

    static void make(const std::string& path) {
        const std::string beside = path + ".new";
        {
            MappedFile made(beside, sizeof(File), true);
            made.grow(sizeof(File));
            File& f = *reinterpret_cast<File*>(made.data());
            std::memcpy(f.magic, kMagic, 8);
            f.version = kVersion;
            std::random_device random;
            f.facts.id = (uint64_t{random()} << 32 | random()) | 1;
            words_of(f).begin();
        }
        if (rename(beside.c_str(), path.c_str()) != 0) throw FolderError(path + " cannot be made: " + std::strerror(errno) + ".");
    }

    [[noreturn]] static void refuse(const std::string& path) {
        throw FolderError(path + " is truncated or altered: it is not a journal. What it held is lost; "
                                 "restore the tables from a snapshot and give another folder.");
    }

    [[noreturn]] static void refuse_push(const Sent& s, const std::string& why) {
        throw FolderError("Push " + std::to_string(s.sequence) + " comes from a client that was silent for long and " + why +
                          " to make room. Start it anew from the last checkpoint.");
    }

    static uint64_t hash_of(const ClientId& id) {
        uint64_t name[2];
        std::memcpy(name, id.data(), sizeof name);
        return mix(mix(name[0] + kGolden) ^ name[1]);
    }

    uint64_t& applied_at(const Entry& e) const { return facts().clients[e.client].applied[e.sequence % kWindow]; }

    Entry& entry_of(const Push& push) const {
        if (push.entry >= kPushes || push.number == 0 || facts().entries[push.entry].number != push.number ||
            !active_[push.entry])
            throw std::invalid_argument("the push is not under way");
        return facts().entries[push.entry];
    }

    bool is_done(const Sent& s) const {
        const auto at = clients_.find(s.client);
        if (at == clients_.end()) {
            if (forgotten_.contains(hash_of(s.client))) refuse_push(s, "whose pushes were forgotten");
            return false;
        }
        const Client& c = facts().clients[at->second];
        if (c.applied[s.sequence % kWindow] > s.sequence) return true;
        if (c.state == kGivenUp) refuse_push(s, "whose unfinished pushes were given up");
        return false;
    }

    Entry* find(const Sent& sent) {
        for (Entry& e : facts().entries)
            if (e.state == kBegun && e.sequence == sent.sequence && facts().clients[e.client].id() == sent.client) return &e;
        return nullptr;
    }

    Entry* take(const Sent& sent) {
        Entry* e = nullptr;
        for (size_t k = 0; k < kPushes && e == nullptr; ++k)
            if (facts().entries[k].state == kFree) e = &facts().entries[k];
        if (e == nullptr) e = give_up_oldest();
        const auto known = clients_.find(sent.client);
        const uint32_t c = known != clients_.end() ? known->second : new_client(sent.client);
        const uint64_t number = facts().numbers + 1;
        words_.set(facts().numbers, number);
        words_.set(facts().clients[c].last, number);
        words_.set(e->number, number);
        words_.set(e->sequence, sent.sequence);
        words_.set(e->client, c);
        words_.set(e->state, kBegun);
        words_.make_changes();
        return e;
    }

    // The longest unfinished push of those nobody is applying: its client has not sent it again since.
    Entry* give_up_oldest() {
        Entry* oldest = nullptr;
        for (size_t k = 0; k < kPushes; ++k) {
            Entry& e = facts().entries[k];
            if (!active_[k] && (oldest == nullptr || e.number < oldest->number)) oldest = &e;
        }
        if (oldest == nullptr) throw std::invalid_argument("more pushes are under way at once than a journal has room for");
        words_.set(facts().clients[oldest->client].state, kGivenUp);
        words_.set(oldest->state, kFree);
        words_.make_changes();
        return oldest;
    }

    // A place for a client: an empty one, or that of the client that was silent longest and has nothing unfinished.
    uint32_t new_client(const ClientId& id) {
        Facts& f = facts();
        std::vector<bool> busy(kClients);
        for (const Entry& e : f.entries)
            if (e.state == kBegun) busy[e.client] = true;
        uint32_t best = kClients;
        for (uint32_t c = 0; c < kClients; ++c) {
            if (f.clients[c].state == kUnknown) {
                best = c;
                break;
            }
            if (!busy[c] && (best == kClients || f.clients[c].last < f.clients[best].last)) best = c;
        }
        if (best == kClients) throw std::invalid_argument("more clients push at once than a journal has room for");
        Client& c = f.clients[best];
        if (c.state != kUnknown) forget(c);
        uint64_t name[2];
        std::memcpy(name, id.data(), sizeof name);
        words_.set(c.name[0], name[0]);
        words_.set(c.name[1], name[1]);
        words_.set(c.state, kKnown);
        for (uint64_t& applied : c.applied)
            if (applied != 0) words_.set(applied, 0);
        words_.make_changes();
        clients_[id] = best;
        return best;
    }

    // With the changes that give its place to another.
    void forget(const Client& c) {
        Facts& f = facts();
        if (f.forgotten_count == kForgotten)
            throw std::invalid_argument("so many clients have come that a journal cannot know them all; take a checkpoint, and restore "
                                        "it on shards with an empty folder");
        const uint64_t hash = hash_of(c.id());
        words_.set(f.forgotten[f.forgotten_count], hash);
        words_.set(f.forgotten_count, f.forgotten_count + 1);
        forgotten_.insert(hash);
        clients_.erase(c.id());
    }

    MappedFile file_;
    CheckedWords words_;
    std::mutex mutex_;
    std::map<ClientId, uint32_t> clients_;
    std::unordered_set<uint64_t> forgotten_;
    std::array<bool, kPushes> active_{};
};

}  // namespace hotrow
