// What the machine can do at most, for benchmarks to compare with: products in registers, and reading memory. No step
// calls these.
#include <atomic>

#include "dot.h"
#include "parallel.h"

namespace {

constexpr int kChains = 12;  // sums side by side: more than two units of five cycles' latency keep busy
constexpr int64_t kItems = 64;  // of a thread: whoever comes late takes fewer
constexpr int64_t kReadBytes = 256 << 10;

enum Product : int { kProductFloat32 = 0, kProductBfloat16 = 1, kProductInt8 = 2 };

std::atomic<int64_t> kept;  // results are used, so nothing is left out

template <class Sum, class Step> void loop(int64_t rounds, Sum zero, const Step& step) {
    Sum sums[kChains];
#pragma GCC unroll 16
    for (int i = 0; i < kChains; i++) {
        sums[i] = zero;
        asm volatile("" : "+v"(sums[i]));  // else all chains would be found to be one
    }
    for (int64_t n = 0; n < rounds; n++)
#pragma GCC unroll 16
        for (int i = 0; i < kChains; i++) sums[i] = step(sums[i]);
    vi all = izero();
    for (int i = 0; i < kChains; i++) {
        alignas(64) u32 lanes[VW];
        std::memcpy(lanes, &sums[i], sizeof(lanes));
        all = iadd(all, iload(lanes));
    }
    kept += sum_lanes(all);
}

}  // namespace

// Operations (a multiplication and an addition are two) that all threads did together; 0 where the CPU has no such
// products.
PDS_EXPORT int64_t pds_products(int kind, int64_t rounds) {
    const int64_t items = kItems * g_num_threads;
    int64_t each = 0;
    if (kind == kProductFloat32) {
        each = 2 * VW;
        parallel_for(items, g_num_threads, [&](int64_t i) {
            const vf a = vset(1.0f + static_cast<float>(i)), b = vset(0.5f);
            loop(rounds, vzero(), [&](vf sum) { return fma(a, b, sum); });
        });
    } else if (kind == kProductInt8) {
        each = 8 * VW;
        parallel_for(items, g_num_threads, [&](int64_t i) {
            const vi a = iset(static_cast<u32>(i)), b = iset(0x01010101u);
            loop(rounds, izero(), [&](vi sum) { return dot4(sum, a, b); });
        });
    }
#if defined(PDS_AVX512) && defined(__AVX512BF16__)
    if (kind == kProductBfloat16) {
        each = 4 * VW;
        parallel_for(items, g_num_threads, [&](int64_t i) {
            const vi a = iset(0x3f803f80u + static_cast<u32>(i)), b = iset(0x3f803f80u);
            loop(rounds, vzero(), [&](vf sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); });
        });
    }
#endif
    return each * kChains * rounds * items;
}

// Reads all bytes once, by all threads. data: aligned to 64, size a multiple of 1 KiB.
PDS_EXPORT void pds_read(const void* data, int64_t size) {
    const int64_t runs = (size + kReadBytes - 1) / kReadBytes;
    parallel_for(runs, g_num_threads, [&](int64_t run) {
        const auto* at = static_cast<const u32*>(data) + run * kReadBytes / 4;
        const auto* end = static_cast<const u32*>(data) + std::min(size, (run + 1) * kReadBytes) / 4;
        vi sums[4] = {izero(), izero(), izero(), izero()};
        for (; at < end; at += 4 * VW)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                _mm_prefetch(reinterpret_cast<const char*>(at + i * VW) + 4096, _MM_HINT_T0);
                sums[i] = iadd(sums[i], iload(at + i * VW));
            }
        kept += sum_lanes(iadd(iadd(sums[0], sums[1]), iadd(sums[2], sums[3])));
    });
}
