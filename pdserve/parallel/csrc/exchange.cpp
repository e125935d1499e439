// Collectives between the ranks of one machine over one shared segment: add and gather.
//
//   0              64 x ranks, padded to 4 KiB
//   | flag rank 0, flag rank 1, … | rank 0 even, odd | rank 1 even, odd | …      each slot is slot_bytes long
//
// Turn t (one per piece of at most slot_bytes): a rank waits until all others have published t - 1, writes its
// slot of t's parity, publishes t, waits until those it reads have published t, and reads. Publishing t - 1
// comes after reading t - 2, so nobody overwrites what somebody still reads. One thread per rank calls.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstring>

#define PDX_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr long kHeadAlign = 4096;
constexpr int kSpins = 400;             // with pauses: some microseconds, less than a futex takes to come back
constexpr long kNapNs = 20 * 1000000L;  // how long a sleeper sleeps before it looks at the clock

struct alignas(64) Flag {
    std::atomic<uint32_t> turn;
    std::atomic<uint32_t> sleepers;
};
static_assert(sizeof(Flag) == 64, "a cache line each");
static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");

double now() {
    timespec at{};
    clock_gettime(CLOCK_MONOTONIC, &at);
    return static_cast<double>(at.tv_sec) + 1e-9 * static_cast<double>(at.tv_nsec);
}

struct Exchange {
    char* segment;
    long rank, ranks, slot_bytes;
    uint32_t turn;  // the last one of ours
    double deadline;

    Flag& flag(long r) const { return reinterpret_cast<Flag*>(segment)[r]; }
    char* slot(long r) const {
        const long head = (ranks * static_cast<long>(sizeof(Flag)) + kHeadAlign - 1) / kHeadAlign * kHeadAlign;
        return segment + head + (2 * r + (turn & 1)) * slot_bytes;
    }
    static bool reached(const Flag& f, uint32_t t) {
        return static_cast<int32_t>(f.turn.load(std::memory_order_acquire) - t) >= 0;  // turns wrap around
    }

    bool wait(long r, uint32_t t) const {
        Flag& f = flag(r);
        for (int i = 0; i < kSpins; i++) {
            if (reached(f, t)) return true;
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        }
        f.sleepers.fetch_add(1);
        bool there;
        while (!(there = reached(f, t)) && now() < deadline) {
            const uint32_t seen = f.turn.load();
            const timespec nap{0, kNapNs};
            if (static_cast<int32_t>(seen - t) < 0) syscall(SYS_futex, &f.turn, FUTEX_WAIT, seen, &nap, nullptr, 0);
        }
        f.sleepers.fetch_sub(1);
        return there;
    }

    void publish() const {
        Flag& f = flag(rank);
        f.turn.store(turn);  // sequentially consistent: before the look at the sleepers
        if (f.sleepers.load() != 0) syscall(SYS_futex, &f.turn, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }

    // Starts a turn: our bytes lie in our slot and the others know. False: somebody was too late.
    bool give(const char* from, long bytes) {
        for (long r = 0; r < ranks; r++)
            if (r != rank && !wait(r, turn)) return false;
        turn++;
        std::memcpy(slot(rank), from, bytes);
        publish();
        return true;
    }
};

template <class T> void sum(const Exchange& e, T* to, long count) {
    std::memcpy(to, e.slot(0), count * sizeof(T));
    for (long r = 1; r < e.ranks; r++) {  // in order of rank, on every rank: the same bits everywhere
        const T* from = reinterpret_cast<const T*>(e.slot(r));
        for (long i = 0; i < count; i++) to[i] += from[i];
    }
}

template <class T> bool add(Exchange& e, T* x, long count) {
    const long most = e.slot_bytes / static_cast<long>(sizeof(T));
    for (long at = 0; at < count; at += most) {
        const long piece = std::min(most, count - at);
        if (!e.give(reinterpret_cast<const char*>(x + at), piece * static_cast<long>(sizeof(T)))) return false;
        for (long r = 0; r < e.ranks; r++)
            if (r != e.rank && !e.wait(r, e.turn)) return false;
        sum(e, x + at, piece);
    }
    return true;
}

}  // namespace

// x becomes the sum over all ranks. kind: 0 float32, 1 uint32, 2 uint8. turn: of this rank, kept by the caller
// between calls. Returns 0, or 1 if a rank did not come in time: then the segment is of no use any more.
PDX_EXPORT int pdx_add(void* segment, int64_t rank, int64_t ranks, int64_t slot_bytes, uint32_t* turn, void* x,
                       int64_t count, int kind, double timeout_s) {
    Exchange e{static_cast<char*>(segment), rank, ranks, slot_bytes, *turn, now() + timeout_s};
    const bool good = kind == 0   ? add(e, static_cast<float*>(x), count)
                      : kind == 1 ? add(e, static_cast<uint32_t*>(x), count)
                                  : add(e, static_cast<uint8_t*>(x), count);
    *turn = e.turn;
    return good ? 0 : 1;
}

// out [ranks][bytes] = every rank's x, where out is not null; who has none only gives. Returns as pdx_add.
PDX_EXPORT int pdx_gather(void* segment, int64_t rank, int64_t ranks, int64_t slot_bytes, uint32_t* turn,
                          const void* x, void* out, int64_t bytes, double timeout_s) {
    Exchange e{static_cast<char*>(segment), rank, ranks, slot_bytes, *turn, now() + timeout_s};
    bool good = true;
    for (long at = 0; at < bytes && good; at += slot_bytes) {
        const long piece = std::min<long>(slot_bytes, bytes - at);
        good = e.give(static_cast<const char*>(x) + at, piece);
        for (long r = 0; r < ranks && good && out != nullptr; r++) {
            good = r == rank || e.wait(r, e.turn);
            if (good) std::memcpy(static_cast<char*>(out) + r * bytes + at, e.slot(r), piece);
        }
    }
    *turn = e.turn;
    return good ? 0 : 1;
}
