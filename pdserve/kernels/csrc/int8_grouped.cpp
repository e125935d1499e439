// Linear layers of 8-bit weights, one scale for each output, and 8-bit rows scaled by group of kGroup inputs: for
// layers whose rows have outliers, as the head's. The weights' order is that of int8.cpp, codes plus 128. Sums of a
// group are exact integers; groups are added as floats in order.
#include "blocks.h"
#include "dot.h"
#include "quantised.h"

namespace {

constexpr int NVP = 2;
constexpr int NR = NVP * VW;
constexpr long kAhead = 512;
#ifdef PDS_AVX512
constexpr int kMaxRows = 6;
#else
constexpr int kMaxRows = 2;
#endif

struct Product {
    Rows8 rows;
    const u32* weight;
    const float* scales;
    const float* bias;
    void* out;
    long num_rows, num_out, steps;
    int out_dtype;
};

template <int MR> void block(const Product& p, long row, long panel) {
    vf acc[MR][NVP];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
        for (int v = 0; v < NVP; v++) acc[r][v] = vzero();
    const long x_row = p.rows.row_bytes / 4;
    const u32* x = reinterpret_cast<const u32*>(p.rows.codes) + row * x_row;
    const u32* w = p.weight + panel * p.steps * NR;
    for (long g = 0; g < p.rows.groups; g++) {
        vi dots[MR][NVP];
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
            for (int v = 0; v < NVP; v++) dots[r][v] = iset(static_cast<u32>(-128 * p.rows.totals[(row + r) * p.rows.groups + g]));
        const long end = std::min((g + 1) * (kGroup / 4), p.steps);
        for (long s = g * (kGroup / 4); s < end; s++, w += NR) {
            for (int v = 0; v < NVP; v++)
                _mm_prefetch(reinterpret_cast<const char*>(w + kAhead + v * VW), _MM_HINT_T0);
            const vi column[NVP] = {iload(w), iload(w + VW)};
#pragma GCC unroll 16
            for (int r = 0; r < MR; r++) {
                const vi word = iset(x[r * x_row + s]);
#pragma GCC unroll 2
                for (int v = 0; v < NVP; v++) dots[r][v] = dot4(dots[r][v], column[v], word);
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
            const vf scale = vset(p.rows.scales[(row + r) * p.rows.groups + g]);
#pragma GCC unroll 2
            for (int v = 0; v < NVP; v++) acc[r][v] = fma(to_float(dots[r][v]), scale, acc[r][v]);
        }
    }
    alignas(64) float sums[MR][NR];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
        for (int v = 0; v < NVP; v++) vstore(sums[r] + v * VW, acc[r][v]);
    const float* scales = p.scales + panel * NR;
    store_block<MR, NVP>(p.out, p.out_dtype, p.bias, row, panel * NR, p.num_out,
                         [&](int r, int v) { return vmul(vload(sums[r] + v * VW), vload(scales + v * VW)); });
}

using BlockFn = void (*)(const Product&, long, long);

struct Kernels {
    BlockFn of[kMaxRows + 1] = {};

    Kernels() { fill<kMaxRows>(); }
    template <int MR> void fill() {
        of[MR] = block<MR>;
        if constexpr (MR > 1) fill<MR - 1>();
    }
};

const Kernels kernels;

}  // namespace

void int8_grouped_linear(const QuantLinear& linear, const Rows8& rows, int64_t num_rows, void* out, int out_dtype) {
    const Product p{rows, static_cast<const u32*>(linear.weight), linear.scales, linear.bias, out, num_rows,
                    linear.num_out, (linear.num_in + 3) / 4, out_dtype};
    const RowBlocks blocks(num_rows, kMaxRows);
    const int threads = threads_for(num_rows * p.steps * p.num_out, 1 << 15);
    for_tiles(blocks.count, (p.num_out + NR - 1) / NR, 16, blocks.count == 1 ? 64 : 4, threads,
              [&](long b, long end_b, long from, long end) {
                  for (; b < end_b; b++)
                      for (long panel = from; panel < end; panel++) kernels.of[blocks.size(b)](p, blocks.start(b), panel);
              });
}
