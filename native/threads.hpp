// A small pool of threads that run the pieces of one batch call. Pieces are taken from a counter, so a slow
// thread never holds up the others, and the caller works too: with a busy machine a call is late, never stuck.
// Several Python threads may call parallel_for at once; each call is a job, and workers help whichever is open.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace hotrow {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
public:
    static Pool& get() {
        // Leaked on purpose: worker threads may outlive static destructors. A forked child has no workers, so it
        // makes its own pool.
        static std::mutex mutex;
        static Pool* pool = nullptr;
        static pid_t owner = 0;
        std::lock_guard lock(mutex);
        if (pool == nullptr || owner != getpid()) {
            pool = new Pool(pool == nullptr ? default_threads() : pool->threads());
            owner = getpid();
        }
        return *pool;
    }

    // All cores, but on large machines one in eight for the interpreter's own threads and torch's: a helper that is put off
    // by one of them holds up the whole call.
    static size_t default_threads() {
        const size_t cores = std::max<size_t>(1, std::thread::hardware_concurrency());
        return cores - cores / 8;
    }

    size_t threads() const { return threads_.load(std::memory_order_relaxed); }

    // The number of threads a call may use, the caller included. Workers are made as needed and kept.
    void set_threads(size_t n) {
        std::lock_guard lock(mutex_);
        threads_ = std::max<size_t>(1, n);
        while (workers_ + 1 < threads_) {
            try {
                std::thread([this, id = workers_] { work(id); }).detach();
            } catch (const std::system_error&) {  // no more threads to be had: do with those there are
                threads_ = workers_ + 1;
                return;
            }
            ++workers_;
        }
    }

    // Calls body(i) once for every i below n, on at most `most` threads. Rethrows the first exception.
    void parallel_for(size_t n, const std::function<void(size_t)>& body, size_t most) {
        most = std::min({most, n, threads()});
        if (most <= 1) {
            for (size_t i = 0; i < n; ++i) body(i);
            return;
        }
        Job job{body, n, most - 1};
        bool all;
        size_t looking;
        {
            std::lock_guard lock(mutex_);
            jobs_.push_back(&job);
            wanted_ += job.helpers_wanted;
            looking = looking_;
            all = most == threads_ || workers_ >= threads_;  // some that sleep may not help
        }
        if (all)
            wake_.notify_all();
        else
            for (size_t i = 1 + looking; i < most; ++i) wake_.notify_one();
        run(job);
        std::unique_lock lock(mutex_);
        std::erase(jobs_, &job);
        wanted_ -= job.helpers_wanted;
        done_.wait(lock, [&] { return job.helpers == 0; });
        if (job.error) std::rethrow_exception(job.error);
    }

private:
    struct Job {
        const std::function<void(size_t)>& body;
        size_t n;
        size_t helpers_wanted;  // guarded by the pool's mutex, as is the next
        size_t helpers = 0;
        std::atomic<size_t> next{0};
        std::exception_ptr error = nullptr;
        std::atomic<bool> failed{false};
    };

    explicit Pool(size_t n) { set_threads(n); }

    static void run(Job& job) {
        for (size_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.n;) {
            try {
                job.body(i);
            } catch (...) {
                if (!job.failed.exchange(true)) job.error = std::current_exception();
                job.next = job.n;
            }
        }
    }

    Job* open_job() {
        for (Job* job : jobs_) {
            if (job->helpers_wanted == 0) continue;
            if (job->next.load(std::memory_order_relaxed) < job->n) return job;
            wanted_ -= job->helpers_wanted;  // nothing is left to help with
            job->helpers_wanted = 0;
        }
        return nullptr;
    }

    size_t most_looking() const { return std::max<size_t>(1, threads() / 4); }

    void work(size_t id) {
        std::unique_lock lock(mutex_);
        for (;;) {
            Job* job = id + 1 < threads_ ? open_job() : nullptr;
            if (job != nullptr) {
                --job->helpers_wanted;
                --wanted_;
                ++job->helpers;
                lock.unlock();
                run(*job);
                lock.lock();
                if (--job->helpers == 0) done_.notify_all();
                continue;
            }
            if (id + 1 < threads_ && looking_ < most_looking()) {
                ++looking_;
                lock.unlock();
                look_out();
                lock.lock();
                --looking_;
            }
            if (wanted_ == 0 || id + 1 >= threads_) wake_.wait(lock);
        }
    }

    // The calls of one training step follow each other within microseconds, and waking a thread takes longer than many of
    // them: look for the next one before sleeping, at first closely, then leaving the core to whoever wants it.
    // Only a few do: if all did, all would come to the lock for a small job that wants a few. What that is worth has not been
    // measured by itself.
    void look_out() {
        using namespace std::chrono;
        const auto start = steady_clock::now();
        for (auto now = start; wanted_.load(std::memory_order_relaxed) == 0 && now < start + microseconds(kLookOut);
             now = steady_clock::now()) {
            if (now < start + microseconds(20))
                relax();
            else
                std::this_thread::yield();
        }
    }

    // Longer than the pauses within a step; not so long that idle workers take the cores from others' threads.
    static constexpr int kLookOut = 200;

    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::vector<Job*> jobs_;
    std::atomic<size_t> wanted_{0};  // helpers that open jobs still have work for
    std::atomic<size_t> threads_{1};
    size_t workers_ = 0;
    size_t looking_ = 0;  // guarded by the mutex
};

// With `most`, on at most so many threads: waking one takes as long as a few hundred rows.
inline void parallel_for(size_t n, const std::function<void(size_t)>& body, size_t most = SIZE_MAX) {
    Pool::get().parallel_for(n, body, most);
}

}  // namespace hotrow
