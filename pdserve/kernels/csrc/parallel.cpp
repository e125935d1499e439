// The threads of the kernels. Several workers share the cores of a machine, so unlike an OpenMP team nobody waits
// for a helper that the system has not got round to running: the caller works alone until helpers come, and at the
// end waits only for items already begun. Helpers spin for a moment between jobs, as the products of a step follow
// each other within microseconds and waking a sleeper costs tens of them; then they sleep.
#include "parallel.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <mutex>
#include <thread>
#include <vector>

#include <immintrin.h>

int g_num_threads = 1;

namespace {

constexpr uint64_t kOpen = 1u << 31;         // the gate takes in helpers
constexpr uint64_t kInside = kOpen - 1;      // helpers inside
constexpr std::chrono::microseconds kSpin(100);

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

class Pool {
  public:
    explicit Pool(int helpers) {
        sigset_t all, before;
        sigfillset(&all);
        // Signals are for the threads of the host program.
        pthread_sigmask(SIG_SETMASK, &all, &before);
        for (int i = 0; i < helpers; i++) threads_.emplace_back([this] { help(); });
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    ~Pool() {
        stop_ = true;
        ring();
        for (auto& thread : threads_) thread.join();
    }

    // False if another thread has the helpers.
    bool run(int64_t count, void (*call)(const void*, int64_t), const void* body) {
        std::unique_lock lock(busy_, std::try_to_lock);
        if (!lock) return false;
        count_ = count, call_ = call, body_ = body;
        next_.store(0, std::memory_order_relaxed);
        gate_.store(kOpen, std::memory_order_release);
        ring();
        work();
        gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
        for (int i = 0; gate_.load(std::memory_order_acquire) & kInside; i++) {
            if (i < 4096) _mm_pause();
            else sched_yield();
        }
        return true;
    }

  private:
    void ring() {
        bell_.fetch_add(1, std::memory_order_seq_cst);
        if (asleep_.load(std::memory_order_seq_cst) > 0) futex(bell_, FUTEX_WAKE, INT_MAX);
    }

    void work() {
        for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) call_(body_, i);
    }

    // count_, call_ and body_ do not change while somebody is inside.
    void help() {
        for (uint32_t heard = 0; !stop_; heard = listen(heard)) {
            uint64_t gate = gate_.load(std::memory_order_relaxed);
            while (gate & kOpen) {
                if (!gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire)) continue;
                work();
                gate_.fetch_sub(1, std::memory_order_release);
                break;
            }
        }
    }

    uint32_t listen(uint32_t heard) {
        const auto end = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int i = 0; i < 64; i++) {
                if (bell_.load(std::memory_order_acquire) != heard) return bell_.load(std::memory_order_acquire);
                _mm_pause();
            }
        } while (std::chrono::steady_clock::now() < end);
        asleep_.fetch_add(1, std::memory_order_seq_cst);
        while (bell_.load(std::memory_order_seq_cst) == heard) futex(bell_, FUTEX_WAIT, heard);
        asleep_.fetch_sub(1, std::memory_order_relaxed);
        return bell_.load(std::memory_order_acquire);
    }

    alignas(64) std::atomic<uint64_t> gate_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<uint32_t> bell_{0};
    std::atomic<int> asleep_{0};
    std::atomic<bool> stop_{false};
    alignas(64) int64_t count_ = 0;
    void (*call_)(const void*, int64_t) = nullptr;
    const void* body_ = nullptr;
    std::mutex busy_;
    std::vector<std::thread> threads_;
};

// Never destroyed at exit: helpers may outlive static objects. A forked child starts without helpers.
Pool* pool = nullptr;

}  // namespace

void run_shared(int64_t count, void (*call)(const void* body, int64_t i), const void* body) {
    if (pool != nullptr && pool->run(count, call, body)) return;
    for (int64_t i = 0; i < count; i++) call(body, i);
}

// Not while another thread runs a kernel, unless the number is the same.
PDS_EXPORT void pds_set_num_threads(int threads) {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { pool = nullptr; });
    (void)registered;
    threads = threads > 0 ? threads : 1;
    if (threads == g_num_threads && (threads == 1 || pool != nullptr)) return;
    g_num_threads = threads;
    delete pool;
    pool = g_num_threads > 1 ? new Pool(g_num_threads - 1) : nullptr;
}
