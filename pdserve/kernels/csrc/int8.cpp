// Linear layers of 8-bit weights and 8-bit rows: one scale for each output, one for each row. Weights lie in panels of
// NR outputs, [panels][steps][NR] of four bytes, codes plus 128; sums over K are exact in 32 bits.
#include "blocks.h"
#include "dot.h"
#include "quantised.h"

namespace {

constexpr int NVP = 2;
constexpr int NR = NVP * VW;
constexpr int kWide = 4;      // panels at once where few rows give too few chains
constexpr int kWideRows = 3;  // ... up to so many rows
constexpr long kAhead = 512;  // words by which weights are called up from memory
constexpr long kTaskBlocks = 20;         // of rows, and bytes of weights, in a task: both fit the second cache
constexpr long kTaskBytes = 1024 * 1024;
#ifdef PDS_AVX512
constexpr int kMaxRows = 14;
#else
constexpr int kMaxRows = 5;
#endif

struct Product {
    Rows8 rows;
    const u32* weight;
    const float* scales;     // [panels * NR]
    const int32_t* offsets;  // [panels * NR]: what codes were moved by
    const float* bias;       // or null
    void* out;
    long num_rows, num_out, steps;
    int out_dtype;
};

// What a sum starts from: its offset times the sum of the row's codes, taken away.
template <int COLS> PDS_INLINE void start(const Product& p, long row, long col, vi (&acc)[COLS]) {
    const u32 total = -static_cast<u32>(p.rows.totals[row]);
#pragma GCC unroll 16
    for (int v = 0; v < COLS; v++)
        acc[v] = imul(iload(reinterpret_cast<const u32*>(p.offsets) + col + v * VW), iset(total));
}

// Loops over accumulators are unrolled so that they stay in registers; sums go through memory once, at the end.
template <int MR, int NB> void block(const Product& p, long row, long panel) {
    constexpr int COLS = NB * NVP;
    vi acc[MR][COLS];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) start(p, row + r, panel * NR, acc[r]);
    const u32* x[(MR + 2) / 3];  // of each third row, so that few pointers do
    const long x_row = p.rows.row_bytes / 4;
    for (int i = 0; i < (MR + 2) / 3; i++) x[i] = reinterpret_cast<const u32*>(p.rows.codes) + (row + 3 * i) * x_row;
    const u32* w[NB];
    for (int i = 0; i < NB; i++) w[i] = p.weight + (panel + i) * p.steps * NR;
    for (long s = 0; s < p.steps; s++) {
        vi column[COLS];
#pragma GCC unroll 16
        for (int v = 0; v < COLS; v++) {
            const u32* at = w[v / NVP] + s * NR + (v % NVP) * VW;
            _mm_prefetch(reinterpret_cast<const char*>(at + kAhead), _MM_HINT_T0);
            column[v] = iload(at);
        }
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
            const vi word = iset(x[r / 3][r % 3 * x_row + s]);
#pragma GCC unroll 16
            for (int v = 0; v < COLS; v++) acc[r][v] = dot4(acc[r][v], column[v], word);
        }
    }
    alignas(64) u32 sums[MR][COLS * VW];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 16
        for (int v = 0; v < COLS; v++) istore(sums[r] + v * VW, acc[r][v]);
    const float* scales = p.scales + panel * NR;
    store_block<MR, COLS>(p.out, p.out_dtype, p.bias, row, panel * NR, p.num_out, [&](int r, int v) {
        return vmul(vmul(to_float(iload(sums[r] + v * VW)), vload(scales + v * VW)), vset(p.rows.scales[row + r]));
    });
}

using BlockFn = void (*)(const Product&, long, long);

struct Kernels {
    BlockFn narrow[kMaxRows + 1] = {};
    BlockFn wide[kWideRows + 1] = {nullptr, block<1, kWide>, block<2, kWide>, block<3, kWide>};

    Kernels() { fill<kMaxRows>(); }
    template <int MR> void fill() {
        narrow[MR] = block<MR, 1>;
        if constexpr (MR > 1) fill<MR - 1>();
    }
};

const Kernels kernels;

void product(const Product& p) {
    const long panels = (p.num_out + NR - 1) / NR, most_panels = std::max(1L, kTaskBytes / (p.steps * NR * 4));
    const RowBlocks blocks(p.num_rows, kMaxRows);
    const int threads = threads_for(p.num_rows * p.steps * p.num_out, 1 << 15);
    for_tiles(blocks.count, panels, kTaskBlocks, most_panels, threads, [&](long b, long end_b, long panel, long end) {
        for (; b < end_b; b++) {
            const long row = blocks.start(b), rows = blocks.size(b);
            long i = panel;
            for (; rows <= kWideRows && i + kWide <= end; i += kWide) kernels.wide[rows](p, row, i);
            for (; i < end; i++) kernels.narrow[rows](p, row, i);
        }
    });
}

}  // namespace

int64_t int8_panel_width() { return NR; }

void int8_linear(const QuantLinear& linear, const Rows8& rows, int64_t num_rows, void* out, int out_dtype) {
    product({rows, static_cast<const u32*>(linear.weight), linear.scales, linear.offsets, linear.bias, out, num_rows,
             linear.num_out, (linear.num_in + 3) / 4, out_dtype});
}

// codes: [num_out][num_in] signed. to: panels * steps * NR words.
PDS_EXPORT void pds_pack_int8(void* to, const int8_t* codes, int64_t num_out, int64_t num_in) {
    const long steps = (num_in + 3) / 4, panels = (num_out + NR - 1) / NR;
    parallel_for(panels, g_num_threads, [&](long panel) {
        auto* at = static_cast<uint8_t*>(to) + panel * steps * NR * 4;
        for (long s = 0; s < steps; s++)
            for (long i = 0; i < NR; i++)
                for (long k = s * 4; k < s * 4 + 4; k++, at++) {
                    const long n = panel * NR + i;
                    *at = static_cast<uint8_t>(n < num_out && k < num_in ? codes[n * num_in + k] + 128 : 0);
                }
    });
}
