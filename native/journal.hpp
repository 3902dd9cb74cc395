// Which pushes were applied, in a mapped file, so that one that is sent again is applied once, whatever was killed between.
//
// A push is named by its client and the client's sequence number. For each client the last sequence numbers done
// stand in a ring, a number s at s % kWindow: one store makes a push done, and a client may have kWindow of them under
// way in any order. A push that has begun has an entry; one that a killed process left keeps its number, by which each
// table knows how far it got (durable.hpp).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

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
    static constexpr size_t kClients = 1024, kWindow = 64;

    explicit Journal(const std::string& path) {
        if (access(path.c_str(), F_OK) != 0) make(path);
        file_ = MappedFile(path, sizeof(File), false);
        if (file_.size() < sizeof(File) || std::memcmp(file().magic, kMagic, 8) != 0)
            throw FolderError(path + " is truncated or altered: it is not a journal. What it held is lost; "
                                     "restore the tables from a snapshot and give another folder.");
        if (file().version != kVersion)
            throw FolderError(path + " is of version " + std::to_string(file().version) + "; this release reads version " +
                              std::to_string(kVersion) + ".");
        for (uint32_t c = 0; c < kClients; ++c)
            if (file().clients[c].state != kUnknown) clients_[file().clients[c].id] = c;
        for (Entry& e : file().entries) {
            if (e.state > kBegun || e.client >= kClients) throw FolderError(path + " was altered: it is not a journal.");
            if (e.state == kBegun && applied_at(e) > e.sequence) e.state = kFree;
        }
    }

    // A push to apply, or one of number 0 if it was applied already.
    Push begin(const Sent& sent) {
        std::lock_guard lock(mutex_);
        if (is_done(sent)) return {};
        Entry* e = find(sent);
        if (e == nullptr) e = take(sent);
        const auto number = static_cast<uint32_t>(e - file().entries);
        if (active_[number]) throw UnderWay("the push is being applied");
        active_[number] = true;
        return {file().id, e->number, number};
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
        in_order();
        applied = std::max(applied, e.sequence + 1);
        in_order();
        e.state = kFree;
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
        entry_of(push).state = kFree;
        active_[push.entry] = false;
    }

    // How many pushes were begun and are not done.
    size_t unfinished() {
        std::lock_guard lock(mutex_);
        const auto& entries = file().entries;
        return static_cast<size_t>(
            std::count_if(std::begin(entries), std::end(entries), [](const Entry& e) { return e.state == kBegun; }));
    }

private:
    enum State : uint32_t { kFree = 0, kBegun = 1 };
    enum Acquaintance : uint32_t { kUnknown = 0, kKnown = 1, kGivenUp = 2 };

    struct Client {
        ClientId id;
        uint32_t state, unused;
        uint64_t last;               // number of its last push
        uint64_t applied[kWindow];  // sequence + 1
    };
    struct Entry {
        uint64_t number, sequence;
        uint32_t client, state;
    };
    struct File {
        char magic[8];
        uint32_t version, unused;
        uint64_t id;       // random: numbers of two journals are never taken for each other
        uint64_t numbers;  // given so far
        Client clients[kClients];
        Entry entries[kPushes];
    };

    static constexpr char kMagic[9] = "HOTROW-J";
    static constexpr uint32_t kVersion = 1;

    File& file() const { return *reinterpret_cast<File*>(file_.data()); }

    static void make(const std::string& path) {
        const std::string beside = path + ".new";
        {
            MappedFile made(beside, sizeof(File), true);
            made.grow(sizeof(File));
            File& f = *reinterpret_cast<File*>(made.data());
            std::memcpy(f.magic, kMagic, 8);
            f.version = kVersion;
            std::random_device random;
            f.id = (uint64_t{random()} << 32 | random()) | 1;
        }
        if (rename(beside.c_str(), path.c_str()) != 0) throw FolderError(path + " cannot be made: " + std::strerror(errno) + ".");
    }

    uint64_t& applied_at(const Entry& e) const { return file().clients[e.client].applied[e.sequence % kWindow]; }

    Entry& entry_of(const Push& push) const {
        if (push.entry >= kPushes || push.number == 0 || file().entries[push.entry].number != push.number ||
            !active_[push.entry])
            throw std::invalid_argument("the push is not under way");
        return file().entries[push.entry];
    }

    bool is_done(const Sent& s) const {
        const auto at = clients_.find(s.client);
        if (at == clients_.end()) return false;
        const Client& c = file().clients[at->second];
        if (c.applied[s.sequence % kWindow] > s.sequence) return true;
        if (c.state == kGivenUp)
            throw FolderError("Push " + std::to_string(s.sequence) + " comes from a client that was silent for long and whose "
                              "unfinished pushes were given up to make room. Start it anew from the last checkpoint.");
        return false;
    }

    Entry* find(const Sent& sent) {
        for (Entry& e : file().entries)
            if (e.state == kBegun && e.sequence == sent.sequence && file().clients[e.client].id == sent.client) return &e;
        return nullptr;
    }

    Entry* take(const Sent& sent) {
        Entry* e = nullptr;
        for (size_t k = 0; k < kPushes && e == nullptr; ++k)
            if (file().entries[k].state == kFree) e = &file().entries[k];
        if (e == nullptr) e = give_up_oldest();
        e->number = ++file().numbers;
        e->sequence = sent.sequence;
        e->client = client(sent.client, e->number);
        in_order();
        e->state = kBegun;
        return e;
    }

    // The longest unfinished push of those nobody is applying: its client has not sent it again since.
    Entry* give_up_oldest() {
        Entry* oldest = nullptr;
        for (size_t k = 0; k < kPushes; ++k) {
            Entry& e = file().entries[k];
            if (!active_[k] && (oldest == nullptr || e.number < oldest->number)) oldest = &e;
        }
        if (oldest == nullptr) throw std::invalid_argument("more pushes are under way at once than a journal has room for");
        file().clients[oldest->client].state = kGivenUp;
        in_order();
        oldest->state = kFree;
        return oldest;
    }

    uint32_t client(const ClientId& id, uint64_t number) {
        const auto known = clients_.find(id);
        const uint32_t c = known != clients_.end() ? known->second : new_client(id);
        clients_[id] = c;
        file().clients[c].last = number;
        return c;
    }

    // A place for a client: an empty one, or that of the client that was silent longest and has nothing unfinished.
    uint32_t new_client(const ClientId& id) {
        std::vector<bool> busy(kClients);
        for (const Entry& e : file().entries)
            if (e.state == kBegun) busy[e.client] = true;
        uint32_t best = kClients;
        for (uint32_t c = 0; c < kClients; ++c) {
            if (file().clients[c].state == kUnknown) {
                best = c;
                break;
            }
            if (!busy[c] && (best == kClients || file().clients[c].last < file().clients[best].last)) best = c;
        }
        if (best == kClients) throw std::invalid_argument("more clients push at once than a journal has room for");
        Client& c = file().clients[best];
        if (c.state != kUnknown) clients_.erase(c.id);
        c.state = kUnknown;
        in_order();
        std::fill(std::begin(c.applied), std::end(c.applied), 0);
        c.id = id;
        in_order();
        c.state = kKnown;
        return best;
    }

    MappedFile file_;
    std::mutex mutex_;
    std::map<ClientId, uint32_t> clients_;
    std::array<bool, kPushes> active_{};
};

}  // namespace hotrow
