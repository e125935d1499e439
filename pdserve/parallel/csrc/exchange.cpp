// Collectives between the ranks of one machine over one shared segment: add, gather, and all to all.
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
    std::atomic<uint32_t> over;  // nobody will come to this turn any more
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
        while (!(there = reached(f, t)) && !f.over.load() && now() < deadline) {
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

    // Starts a turn: what fill writes lies in our slot and the others know. False: somebody was too late.
    template <class F> bool give_with(F fill) {
        for (long r = 0; r < ranks; r++)
            if (r != rank && !wait(r, turn)) return false;
        turn++;
        fill(slot(rank));
        publish();
        return true;
    }
    bool give(const char* from, long bytes) {
        return give_with([&](char* to) { std::memcpy(to, from, bytes); });
    }
};

// Who sends how much to whom. A rank's stream is what it sends to the others, in order of rank: its own part
// stays out of the segment.
struct Lots {
    const int64_t* bytes;  // [ranks][ranks], from and to
    long ranks;

    long of(long from, long to) const { return bytes[from * ranks + to]; }
    long begin(long from, long to) const {  // in the stream of `from`
        long at = 0;
        for (long r = 0; r < to; r++) at += r == from ? 0 : of(from, r);
        return at;
    }
    long most() const {
        long most = 0;
        for (long r = 0; r < ranks; r++) most = std::max(most, begin(r, ranks));
        return most;
    }
};

// Bytes [at, at + size) of rank's stream, out of x, which has the own part where its turn is.
void fill_stream(char* to, const char* x, const Lots& lots, long rank, long at, long size) {
    const long hole = lots.begin(rank, rank);
    const long before = std::clamp<long>(hole - at, 0, size);
    std::memcpy(to, x + at, before);
    std::memcpy(to + before, x + at + before + lots.of(rank, rank), size - before);
}

bool all_to_all(Exchange& e, const char* x, char* out, const Lots& lots) {
    const long me = e.rank, own = lots.of(me, me), length = lots.begin(me, e.ranks), most = lots.most();
    long to_own = 0;
    for (long r = 0; r < me; r++) to_own += lots.of(r, me);
    std::memcpy(out + to_own, x + lots.begin(me, me), own);
    for (long at = 0; at < most; at += e.slot_bytes) {
        const long size = std::clamp<long>(length - at, 0, e.slot_bytes);
        if (!e.give_with([&](char* slot) { fill_stream(slot, x, lots, me, at, size); })) return false;
        char* to = out;
        for (long r = 0; r < e.ranks; to += lots.of(r, me), r++) {
            const long begin = lots.begin(r, me), from = std::max(begin, at);
            const long end = std::min(begin + lots.of(r, me), at + e.slot_bytes);
            if (r == me || from >= end) continue;  // nothing of theirs is ours in this turn
            if (!e.wait(r, e.turn)) return false;
            std::memcpy(to + from - begin, e.slot(r) + from - at, end - from);
        }
    }
    return true;
}

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

// From now on nobody waits for a rank: who has to fails as if it were too late.
PDX_EXPORT void pdx_abort(void* segment, int64_t ranks) {
    for (long r = 0; r < ranks; r++) {
        Flag& f = reinterpret_cast<Flag*>(segment)[r];
        f.over.store(1);
        syscall(SYS_futex, &f.turn, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }
}

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

// x: for each rank, in order, the bytes it gets; out: from each rank, in order, what it sends. bytes: [ranks][ranks],
// from and to, the same on all ranks. Returns as pdx_add.
PDX_EXPORT int pdx_all_to_all(void* segment, int64_t rank, int64_t ranks, int64_t slot_bytes, uint32_t* turn,
                              const void* x, void* out, const int64_t* bytes, double timeout_s) {
    Exchange e{static_cast<char*>(segment), rank, ranks, slot_bytes, *turn, now() + timeout_s};
    const bool good = all_to_all(e, static_cast<const char*>(x), static_cast<char*>(out), Lots{bytes, ranks});
    *turn = e.turn;
    return good ? 0 : 1;
}
