// Linear layers: weights in panels of NR outputs, [panels][steps][NR] of 4-byte steps, zero-padded.
// Rows are packed in blocks of up to MR the same way. One chain of multiply-adds over K per output.
#include <algorithm>

#include "tile.h"

int g_num_threads = 1;

namespace {

constexpr int NVP = 2;
constexpr int NR = NVP * VW;
constexpr int kWide = 4;          // panels at once where few rows give too few chains
constexpr int kWideRows = 3;      // ... up to so many rows
constexpr int kBlocksAtOnce = 8;  // row blocks that share a panel while it is in the near cache
constexpr long kStepsAtOnce = 1024;

#ifdef PDS_BF16
template <class T> constexpr int kMaxRows = 14;
#elif defined(PDS_AVX512)
template <class T> constexpr int kMaxRows = sizeof(T) == 4 ? 14 : 12;
#else
template <class T> constexpr int kMaxRows = sizeof(T) == 4 ? 6 : 4;
#endif

struct Product {
    const u32* a;  // packed rows
    const u32* w;
    const float* bias;
    void* out;
    long rows, num_out, steps;
    bool out_float;
};

// Rows in nearly equal blocks: block i starts at start(i).
struct RowBlocks {
    long count, base, extra;

    RowBlocks(long rows, long most) : count((rows + most - 1) / most), base(rows / count), extra(rows % count) {}
    long start(long i) const { return i * base + std::min(i, extra); }
    long rows(long i) const { return base + (i < extra); }
};

template <class T, int COLS> PDS_INLINE void finish(const Product& p, long row, long col, const vf (&sums)[COLS]) {
    for (int v = 0; v < COLS; v++, col += VW) {
        if (col >= p.num_out) return;
        const bool whole = col + VW <= p.num_out;
        const Mask mask = first(whole ? VW : static_cast<int>(p.num_out - col));
        vf x = sums[v];
        if (p.bias != nullptr) x = vadd(x, vload(p.bias + col, mask));
        const long at = row * p.num_out + col;
        if (p.out_float) vstore(static_cast<float*>(p.out) + at, x, mask);
        else store_rounded(static_cast<T*>(p.out) + at, x, mask);
    }
}

// One row block times NB panels over steps [from, to). Sums wait in `partial` between ranges of steps.
template <class T, int MR, int NB>
void block(const Product& p, long row, long panel, long from, long to, float* partial) {
    vf acc[MR][NB * NVP];
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < NB * NVP; v++) acc[r][v] = from == 0 ? vzero() : vload(partial + (r * NB * NVP + v) * VW);
    const u32* bases[NB];
    for (int i = 0; i < NB; i++) bases[i] = p.w + ((panel + i) * p.steps + from) * NR;
    tile<T, MR, NB, NVP, 1, MR>(acc, p.a + row * p.steps + from * MR, bases, NR, to - from);
    for (int r = 0; r < MR; r++) {
        if (to == p.steps) finish<T>(p, row + r, panel * NR, acc[r]);
        else
            for (int v = 0; v < NB * NVP; v++) vstore(partial + (r * NB * NVP + v) * VW, acc[r][v]);
    }
}

using BlockFn = void (*)(const Product&, long, long, long, long, float*);

template <class T, int MR> struct BlockTable {
    static void fill(BlockFn* table) {
        table[MR] = block<T, MR, 1>;
        if constexpr (MR > 1) BlockTable<T, MR - 1>::fill(table);
    }
};

template <class T> struct Kernels {
    BlockFn narrow[kMaxRows<T> + 1] = {};
    BlockFn wide[kWideRows + 1] = {nullptr, block<T, 1, kWide>, block<T, 2, kWide>, block<T, 3, kWide>};

    Kernels() { BlockTable<T, kMaxRows<T>>::fill(narrow); }
};

template <class T> const Kernels<T> kernels;

// Few rows: every weight is read once, panels in order. Row blocks: just one.
template <class T> void few_rows(const Product& p, long panels) {
    const BlockFn narrow = kernels<T>.narrow[p.rows];
    const BlockFn wide = p.rows <= kWideRows ? kernels<T>.wide[p.rows] : nullptr;
    const int threads = threads_for(p.rows * p.steps * p.num_out, 1 << 16);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int part = 0; part < threads; part++) {
        long panel = panels * part / threads;
        const long end = panels * (part + 1) / threads;
        for (; wide != nullptr && panel + kWide <= end; panel += kWide) wide(p, 0, panel, 0, p.steps, nullptr);
        for (; panel < end; panel++) narrow(p, 0, panel, 0, p.steps, nullptr);
    }
}

template <class T> void chunk_of_rows(const Product& p, const RowBlocks& blocks, long first_block, long panel) {
    alignas(64) float partial[kBlocksAtOnce][kMaxRows<T> * NR];
    const long end = std::min(first_block + kBlocksAtOnce, blocks.count);
    for (long from = 0; from < p.steps; from += kStepsAtOnce) {
        const long to = std::min(from + kStepsAtOnce, p.steps);
        for (long i = first_block; i < end; i++)
            kernels<T>.narrow[blocks.rows(i)](p, blocks.start(i), panel, from, to, partial[i - first_block]);
    }
}

template <class T> u32 load_step(const T* row, long step, long num_in) {
    u32 bits = 0;
    const long at = step * kElemsPerStep<T>;
    std::memcpy(&bits, row + at, sizeof(T) * std::min<long>(kElemsPerStep<T>, num_in - at));
    return bits;
}

// Rows [row, row + count) to [steps][count].
template <class T> void pack_block(u32* to, const T* x, long row, long count, long steps, long num_in) {
    const bool whole = num_in % kElemsPerStep<T> == 0;
    for (long from = 0; from < steps; from += 16) {
        const long end = std::min(from + 16, steps);
        for (long r = 0; r < count; r++) {
            const T* source = x + (row + r) * num_in;
            for (long s = from; s < end; s++) {
                if (whole) std::memcpy(to + s * count + r, source + s * kElemsPerStep<T>, sizeof(u32));
                else to[s * count + r] = load_step(source, s, num_in);
            }
        }
    }
}

template <class T> void product(Product p, const T* x, long num_in) {
    static thread_local Scratch scratch;
    const long panels = (p.num_out + NR - 1) / NR;
    const RowBlocks blocks(p.rows, kMaxRows<T>);
    u32* packed = nullptr;
    if (p.rows == 1 && num_in % kElemsPerStep<T> == 0) p.a = reinterpret_cast<const u32*>(x);
    else p.a = packed = scratch.get<u32>(p.rows * p.steps);
    if (blocks.count == 1) {
        if (packed != nullptr) pack_block(packed, x, 0, p.rows, p.steps, num_in);
        few_rows<T>(p, panels);
        return;
    }
    const long chunks = (blocks.count + kBlocksAtOnce - 1) / kBlocksAtOnce;
#pragma omp parallel num_threads(g_num_threads)
    {
#pragma omp for schedule(dynamic)
        for (long i = 0; i < blocks.count; i++)
            pack_block(packed + blocks.start(i) * p.steps, x, blocks.start(i), blocks.rows(i), p.steps, num_in);
#pragma omp for schedule(dynamic) collapse(2)
        for (long chunk = 0; chunk < chunks; chunk++)
            for (long panel = 0; panel < panels; panel++)
                chunk_of_rows<T>(p, blocks, chunk * kBlocksAtOnce, panel);
    }
}

template <class T> void pack_weight(u32* to, const T* weight, long num_out, long num_in) {
    const long steps = (num_in + kElemsPerStep<T> - 1) / kElemsPerStep<T>;
    const long panels = (num_out + NR - 1) / NR;
#pragma omp parallel for schedule(static) num_threads(g_num_threads)
    for (long panel = 0; panel < panels; panel++)
        for (long i = 0; i < NR; i++) {
            const long n = panel * NR + i;
            for (long s = 0; s < steps; s++)
                to[(panel * steps + s) * NR + i] = n < num_out ? load_step(weight + n * num_in, s, num_in) : 0;
        }
}

}  // namespace

PDS_EXPORT void pds_set_num_threads(int threads) { g_num_threads = threads > 0 ? threads : 1; }

PDS_EXPORT int pds_panel_width() { return NR; }

// The instruction set this library was built for; part of the numerics id.
PDS_EXPORT const char* pds_isa() {
#ifdef PDS_BF16
    return "avx512-bf16";
#elif defined(PDS_AVX512)
    return "avx512";
#else
    return "avx2";
#endif
}

PDS_EXPORT void pds_pack_linear(void* to, const void* weight, int64_t num_out, int64_t num_in, int dtype) {
    if (dtype == kFloat32) pack_weight(static_cast<u32*>(to), static_cast<const float*>(weight), num_out, num_in);
    else pack_weight(static_cast<u32*>(to), static_cast<const bf16*>(weight), num_out, num_in);
}

PDS_EXPORT void pds_linear(void* out, const void* x, const void* weight, const float* bias, int64_t rows,
                           int64_t num_out, int64_t num_in, int dtype, int out_float) {
    Product p{nullptr, static_cast<const u32*>(weight), bias, out, rows, num_out, 0, out_float != 0};
    if (rows == 0) return;
    p.steps = dtype == kFloat32 ? num_in : (num_in + 1) / 2;
    if (dtype == kFloat32) product(p, static_cast<const float*>(x), num_in);
    else product(p, static_cast<const bf16*>(x), num_in);
}
