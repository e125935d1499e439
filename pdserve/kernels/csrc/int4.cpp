// Linear layers of 4-bit weights and 8-bit rows, scaled by group: weight = code * scale + low for each output and group
// of inputs, rows by groups of kGroup inputs. Sums of a group are exact integers; groups are added as floats in order.
//
// Weights lie in panels of VW outputs. A panel is its weight groups in order: VW scales and VW lows (16-bit floats),
// then for each kGroup inputs of the group four vectors of VW words; byte b of a word of vector v holds the codes of
// inputs 8 v + b (low half) and 8 v + 4 + b (high half).
#include "blocks.h"
#include "dot.h"
#include "quantised.h"

namespace {

constexpr int kVectors = kGroup / 8;                // of packed codes in kGroup inputs
constexpr long kCodeBytes = kVectors * VW * 4;      // ... of a panel
constexpr long kScaleBytes = 2 * VW * 2;            // scales and lows of a panel's weight group
constexpr long kAheadBytes = 1536;
#ifdef PDS_AVX512
constexpr int kMaxRows = 12, kPairRows = 7;
constexpr int panels_at_once(int rows) { return rows <= 2 ? 4 : rows <= 5 ? 2 : 1; }
#else
constexpr int kMaxRows = 4, kPairRows = 2;
constexpr int panels_at_once(int rows) { return rows == 1 ? 2 : 1; }
#endif

constexpr int kFewRows = 12;      // rows up to which codes are unpacked where they are used
constexpr long kTaskBlocks = 40;  // of rows: they fit the second cache

struct Product {
    Rows8 rows;
    const uint8_t* weight;
    const float* factors;  // [panels * VW]
    const float* bias;
    void* out;
    long num_rows, num_out, blocks, group_blocks, panel_bytes;
    int out_dtype;
};

template <int MR, int NP> void block(const Product& p, long row, long panel) {
    const vi low_half = iset(0x0f0f0f0fu);
    vf acc[MR][NP];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
        for (int i = 0; i < NP; i++) acc[r][i] = vzero();
    const uint8_t* w[NP];
    for (int i = 0; i < NP; i++) w[i] = p.weight + (panel + i) * p.panel_bytes;
    const long x_row = p.rows.row_bytes / 4;
    const u32* x[(MR + 2) / 3];  // of each third row, so that few pointers do
    for (int i = 0; i < (MR + 2) / 3; i++) x[i] = reinterpret_cast<const u32*>(p.rows.codes) + (row + 3 * i) * x_row;
    for (long from = 0; from < p.blocks; from += p.group_blocks) {
        vf scale[NP], low[NP];
        for (int i = 0; i < NP; i++) {
            const auto* halves = reinterpret_cast<const uint16_t*>(w[i]);
            scale[i] = load_half(halves), low[i] = load_half(halves + VW);
            w[i] += kScaleBytes;
        }
        const long end = std::min(from + p.group_blocks, p.blocks);
        for (long b = from; b < end; b++) {
            vi dots[MR][NP];
#pragma GCC unroll 16
            for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
                for (int i = 0; i < NP; i++) dots[r][i] = izero();
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; v++) {
                vi codes[NP][2];
#pragma GCC unroll 4
                for (int i = 0; i < NP; i++) {
                    const uint8_t* at = w[i] + v * VW * 4;
                    _mm_prefetch(reinterpret_cast<const char*>(at + kAheadBytes), _MM_HINT_T0);
                    const vi pair = iload(reinterpret_cast<const u32*>(at));
                    codes[i][0] = iand(pair, low_half);
                    codes[i][1] = iand(ishift_down(pair, 4), low_half);
                }
#pragma GCC unroll 16
                for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
                    for (int half = 0; half < 2; half++) {
                        const vi word = iset(x[r / 3][r % 3 * x_row + b * (kGroup / 4) + 2 * v + half]);
#pragma GCC unroll 4
                        for (int i = 0; i < NP; i++) dots[r][i] = dot4(dots[r][i], codes[i][half], word);
                    }
            }
#pragma GCC unroll 16
            for (int r = 0; r < MR; r++) {
                const vf x_scale = vset(p.rows.scales[(row + r) * p.rows.groups + b]);
                const vf x_sum = vset(p.rows.sums[(row + r) * p.rows.groups + b]);
#pragma GCC unroll 4
                for (int i = 0; i < NP; i++) {
                    acc[r][i] = fma(vmul(to_float(dots[r][i]), scale[i]), x_scale, acc[r][i]);
                    acc[r][i] = fma(low[i], x_sum, acc[r][i]);
                }
            }
#pragma GCC unroll 4
            for (int i = 0; i < NP; i++) w[i] += kCodeBytes;
        }
    }
    alignas(64) float sums[MR][NP * VW];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 4
        for (int i = 0; i < NP; i++) vstore(sums[r] + i * VW, acc[r][i]);
    const float* factors = p.factors + panel * VW;
    store_block<MR, NP>(p.out, p.out_dtype, p.bias, row, panel * VW, p.num_out,
                        [&](int r, int i) { return vmul(vload(sums[r] + i * VW), vload(factors + i * VW)); });
}

// Two panels with codes of a byte, for many rows: unpacked once, then used by block after block of them.
struct Pair {
    u32* codes;            // [blocks][kGroup / 4][2 VW]
    float *scales, *lows;  // [weight groups][2 VW]

    Pair(const Product& p, Scratch& scratch) {
        const long codes_at = p.blocks * (kGroup / 4) * 2 * VW, groups = (p.blocks + p.group_blocks - 1) / p.group_blocks;
        codes = scratch.get<u32>(codes_at + 2 * groups * 2 * VW);
        scales = reinterpret_cast<float*>(codes + codes_at), lows = scales + groups * 2 * VW;
    }

    // From panel `panel` on; the second may lie beyond the last one.
    void unpack(const Product& p, long panel, long panels) {
        for (int i = 0; i < 2; i++)
            if (panel + i < panels) unpack_one(p, p.weight + (panel + i) * p.panel_bytes, i * VW);
    }

  private:
    void unpack_one(const Product& p, const uint8_t* from, long lane) {
        const vi low_half = iset(0x0f0f0f0fu);
        for (long b = 0; b < p.blocks; b++) {
            if (b % p.group_blocks == 0) {
                const auto* halves = reinterpret_cast<const uint16_t*>(from);
                const long at = b / p.group_blocks * 2 * VW + lane;
                vstore(scales + at, load_half(halves)), vstore(lows + at, load_half(halves + VW));
                from += kScaleBytes;
            }
            u32* to = codes + b * (kGroup / 4) * 2 * VW + lane;
            for (int v = 0; v < kVectors; v++, from += VW * 4, to += 4 * VW) {
                const vi pair = iload(reinterpret_cast<const u32*>(from));
                istore(to, iand(pair, low_half)), istore(to + 2 * VW, iand(ishift_down(pair, 4), low_half));
            }
        }
    }
};

// The same sums in the same order as block's. ahead: what to call up meanwhile, a cache line for each step.
template <int MR, bool AHEAD> void pair_block(const Product& p, const Pair& pair, long row, long panel, const uint8_t* ahead) {
    vf acc[MR][2];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) acc[r][0] = acc[r][1] = vzero();
    const long x_row = p.rows.row_bytes / 4;
    const u32* x[(MR + 2) / 3];
    for (int i = 0; i < (MR + 2) / 3; i++) x[i] = reinterpret_cast<const u32*>(p.rows.codes) + (row + 3 * i) * x_row;
    const u32* w = pair.codes;
    const float* x_scales = p.rows.scales + row * p.rows.groups;
    const float* x_sums = p.rows.sums + row * p.rows.groups;
    long group = 0, left = p.group_blocks;
    for (long b = 0; b < p.blocks; b++) {
        vi dots[MR][2];
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) dots[r][0] = dots[r][1] = izero();
        for (long s = b * (kGroup / 4); s < (b + 1) * (kGroup / 4); s++, w += 2 * VW) {
            if constexpr (AHEAD) _mm_prefetch(reinterpret_cast<const char*>(ahead + s * 64), _MM_HINT_T1);
            const vi column[2] = {iload(w), iload(w + VW)};
#pragma GCC unroll 16
            for (int r = 0; r < MR; r++) {
                const vi word = iset(x[r / 3][r % 3 * x_row + s]);
                dots[r][0] = dot4(dots[r][0], column[0], word), dots[r][1] = dot4(dots[r][1], column[1], word);
            }
        }
        const float *scale = pair.scales + group * 2 * VW, *low = pair.lows + group * 2 * VW;
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
            const vf x_scale = vset(x_scales[r * p.rows.groups + b]), x_sum = vset(x_sums[r * p.rows.groups + b]);
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                acc[r][i] = fma(vmul(to_float(dots[r][i]), vload(scale + i * VW)), x_scale, acc[r][i]);
                acc[r][i] = fma(vload(low + i * VW), x_sum, acc[r][i]);
            }
        }
        if (--left == 0) group++, left = p.group_blocks;
    }
    alignas(64) float sums[MR][2 * VW];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) vstore(sums[r], acc[r][0]), vstore(sums[r] + VW, acc[r][1]);
    const float* factors = p.factors + panel * VW;
    store_block<MR, 2>(p.out, p.out_dtype, p.bias, row, panel * VW, p.num_out,
                       [&](int r, int i) { return vmul(vload(sums[r] + i * VW), vload(factors + i * VW)); });
}

using BlockFn = void (*)(const Product&, long, long);
using PairFn = void (*)(const Product&, const Pair&, long, long, const uint8_t*);

struct Kernels {
    BlockFn one[kMaxRows + 1] = {}, wide[kMaxRows + 1] = {};
    PairFn pair[kPairRows + 1] = {}, pair_ahead[kPairRows + 1] = {};

    Kernels() { fill<kMaxRows>(), fill_pairs<kPairRows>(); }
    template <int MR> void fill_pairs() {
        pair[MR] = pair_block<MR, false>, pair_ahead[MR] = pair_block<MR, true>;
        if constexpr (MR > 1) fill_pairs<MR - 1>();
    }
    template <int MR> void fill() {
        one[MR] = block<MR, 1>;
        wide[MR] = block<MR, panels_at_once(MR)>;
        if constexpr (MR > 1) fill<MR - 1>();
    }
};

const Kernels kernels;

void few_rows(const Product& p, int threads) {
    const long panels = (p.num_out + VW - 1) / VW;
    const RowBlocks blocks(p.num_rows, kMaxRows);
    for_tiles(blocks.count, panels, 1, 128, threads, [&](long b, long, long panel, long end) {
        const long row = blocks.start(b), rows = blocks.size(b), at_once = panels_at_once(static_cast<int>(rows));
        long i = panel;
        for (; i + at_once <= end; i += at_once) kernels.wide[rows](p, row, i);
        for (; i < end; i++) kernels.one[rows](p, row, i);
    });
}

void many_rows(const Product& p, int threads) {
    const long panels = (p.num_out + VW - 1) / VW;
    const RowBlocks blocks(p.num_rows, kPairRows);
    const long step_bytes = p.blocks * (kGroup / 4) * 64, ahead_blocks = (2 * p.panel_bytes + step_bytes - 1) / step_bytes;
    for_tiles(blocks.count, (panels + 1) / 2, kTaskBlocks, 64, threads, [&](long from, long to, long pair, long end) {
        static thread_local Scratch scratch;
        Pair unpacked(p, scratch);
        for (; pair < end; pair++) {
            unpacked.unpack(p, pair * 2, panels);
            const uint8_t* next = p.weight + (pair * 2 + 2) * p.panel_bytes;
            for (long b = from; b < to; b++) {
                const auto& fns = b - from < ahead_blocks ? kernels.pair_ahead : kernels.pair;
                fns[blocks.size(b)](p, unpacked, blocks.start(b), pair * 2, next + (b - from) * step_bytes);
            }
        }
    });
}

void product(const Product& p) {
    const int threads = threads_for(p.num_rows * p.blocks * 8 * p.num_out, 1 << 15);
    if (p.num_rows <= kFewRows) few_rows(p, threads);
    else many_rows(p, threads);
}

long panel_bytes(long blocks, long group_blocks) {
    return (blocks + group_blocks - 1) / group_blocks * kScaleBytes + blocks * kCodeBytes;
}

}  // namespace

void int4_linear(const QuantLinear& linear, const Rows8& rows, int64_t num_rows, void* out, int out_dtype) {
    const long blocks = groups_of(linear.num_in);
    product({rows, static_cast<const uint8_t*>(linear.weight), linear.scales, linear.bias, out, num_rows, linear.num_out,
             blocks, linear.group_blocks, panel_bytes(blocks, linear.group_blocks), out_dtype});
}

PDS_EXPORT int64_t pds_int4_bytes(int64_t num_out, int64_t num_in, int64_t group_blocks) {
    return (num_out + VW - 1) / VW * panel_bytes(groups_of(num_in), group_blocks);
}

// codes: [num_out][num_in], 0 to 15. scales, lows: [num_out][groups of group_blocks * kGroup inputs], 16-bit floats.
PDS_EXPORT void pds_pack_int4(void* to, const uint8_t* codes, const uint16_t* scales, const uint16_t* lows,
                              int64_t num_out, int64_t num_in, int64_t group_blocks) {
    const long blocks = groups_of(num_in), groups = (blocks + group_blocks - 1) / group_blocks;
    parallel_for((num_out + VW - 1) / VW, g_num_threads, [&](long panel) {
        auto* at = static_cast<uint8_t*>(to) + panel * panel_bytes(blocks, group_blocks);
        const auto code = [&](long n, long k) { return n < num_out && k < num_in ? codes[n * num_in + k] : 0; };
        for (long b = 0; b < blocks; b++) {
            if (b % group_blocks == 0)
                for (const uint16_t* from : {scales, lows})
                    for (long n = panel * VW; n < panel * VW + VW; n++, at += 2) {
                        const uint16_t half = n < num_out ? from[n * groups + b / group_blocks] : 0;
                        std::memcpy(at, &half, 2);
                    }
            for (long v = 0; v < kVectors; v++)
                for (long n = panel * VW; n < panel * VW + VW; n++)
                    for (long k = b * kGroup + v * 8; k < b * kGroup + v * 8 + 4; k++)
                        *at++ = static_cast<uint8_t>(code(n, k) | code(n, k + 4) << 4);
        }
    });
}
