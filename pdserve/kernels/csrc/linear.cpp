// Linear layers, single and grouped (one weight per run of rows): weights in panels of NR outputs, [panels][steps][NR] of 4-byte steps, zero-padded. Rows are
// turned into words (tile.h) first. One chain of multiply-adds over K per output, whatever the number of rows.
#include <sys/mman.h>

#include <vector>

#include "blocks.h"
#include "tile.h"

namespace {

constexpr int NVP = 2;
constexpr int NR = NVP * VW;
constexpr int kWide = 4;          // panels at once where few rows give too few chains
constexpr int kWideRows = 3;      // ... up to so many rows
constexpr int kBlocksAtOnce = 8;  // row blocks and panels of a task: together they fit the second cache
constexpr int kPanelsAtOnce = 4;
constexpr long kAhead = 512;      // words by which weights are called up from memory
constexpr long kRange = 768;      // words of a row that are worked on at once: a row block fits the first cache
constexpr long kRow = kRange + 16;  // words from row to row: not a multiple of 4 KiB, the near cache's period

#ifdef PDS_AVX512
template <class T> constexpr int kMaxRows = kWidens<T> ? 12 : 14;
#else
template <class T> constexpr int kMaxRows = kWidens<T> ? 4 : 6;
#endif

struct Product {
    const u32* rows;    // [ranges][num_rows][kRow] words
    long range_stride;  // words from a range to the next
    const u32* weight;
    const float* bias;
    void* out;
    long num_rows, num_out, words;
    bool out_float;
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
        else if (whole) store_rounded(static_cast<T*>(p.out) + at, x);
        else store_rounded(static_cast<T*>(p.out) + at, x, mask);
    }
}

// One row block times NB panels over words [from, to). Sums wait in `partial` between calls.
template <class T, int MR, int NB>
void block(const Product& p, long row, long panel, long from, long to, float* partial) {
    vf acc[MR][NB * NVP];
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < NB * NVP; v++) acc[r][v] = from == 0 ? vzero() : vload(partial + (r * NB * NVP + v) * VW);
    for (long range = from; range < to; range += kRange) {
        const long steps = std::min(kRange, to - range) / kWordsPerStep<T>;
        const u32* bases[NB];
        for (int i = 0; i < NB; i++) bases[i] = p.weight + ((panel + i) * p.words + range) / kWordsPerStep<T> * NR;
        tile<T, MR, NB, NVP, kRow, 1, false, kAhead>(acc, p.rows + range / kRange * p.range_stride + row * kRow, bases, NR, steps);
    }
    for (int r = 0; r < MR; r++) {
        if (to == p.words) finish<T>(p, row + r, panel * NR, acc[r]);
        else
            for (int v = 0; v < NB * NVP; v++) vstore(partial + (r * NB * NVP + v) * VW, acc[r][v]);
    }
}

using BlockFn = void (*)(const Product&, long, long, long, long, float*);

template <class T> struct Kernels {
    BlockFn narrow[kMaxRows<T> + 1] = {};
    BlockFn wide[kWideRows + 1] = {nullptr, block<T, 1, kWide>, block<T, 2, kWide>, block<T, 3, kWide>};

    Kernels() { fill<kMaxRows<T>>(); }
    template <int MR> void fill() {
        narrow[MR] = block<T, MR, 1>;
        if constexpr (MR > 1) fill<MR - 1>();
    }
};

template <class T> const Kernels<T> kernels;

// One row block times panels [panel, end), in order.
template <class T> void few_rows(const Product& p, long panel, long end) {
    const BlockFn narrow = kernels<T>.narrow[p.num_rows];
    const BlockFn wide = p.num_rows <= kWideRows ? kernels<T>.wide[p.num_rows] : nullptr;
    for (; wide != nullptr && panel + kWide <= end; panel += kWide) wide(p, 0, panel, 0, p.words, nullptr);
    for (; panel < end; panel++) narrow(p, 0, panel, 0, p.words, nullptr);
}

// One row block: every weight is read once.
template <class T> void few_rows(const Product& p, long panels) {
    const int threads = threads_for(p.num_rows * p.words * p.num_out, 1 << 16);
    const long shares = threads == 1 ? 1 : std::min<long>(threads * 4, panels);
    parallel_for(shares, threads,
                 [&](long share) { few_rows<T>(p, panels * share / shares, panels * (share + 1) / shares); });
}

// Some row blocks times panels [from_panel, end_panel): rows stay in the near cache while the panels pass by.
template <class T>
void chunk(const Product& p, const RowBlocks& blocks, long from_block, long from_panel, long end_panel) {
    alignas(64) float partial[kBlocksAtOnce][kPanelsAtOnce][kMaxRows<T> * NR];
    const long end_block = std::min(from_block + kBlocksAtOnce, blocks.count);
    for (long from = 0; from < p.words; from += kRange) {
        const long to = std::min(from + kRange, p.words);
        for (long i = from_block; i < end_block; i++)
            for (long panel = from_panel; panel < end_panel; panel++)
                kernels<T>.narrow[blocks.size(i)](p, blocks.start(i), panel, from, to,
                                                  partial[i - from_block][panel - from_panel]);
    }
}

template <class T> void load_row(u32* to, const T* x, long row, const Product& p, long num_in) {
    constexpr long elems = kRange * kElemsPerWord<T>;
    for (long at = 0; at < num_in; at += elems, to += p.range_stride)
        load_words(to + row * kRow, x + row * num_in + at, std::min(elems, num_in - at));
}

template <class T> void product(Product p, const T* x, long num_in) {
    static thread_local Scratch scratch;
    const long panels = (p.num_out + NR - 1) / NR;
    const RowBlocks blocks(p.num_rows, kMaxRows<T>);
    const bool as_is = p.num_rows == 1 && std::is_same_v<T, Left<T>> && num_in % kElemsPerStep<T> == 0;
    p.range_stride = as_is ? kRange : p.num_rows * kRow;
    u32* words = as_is ? nullptr : scratch.get<u32>((p.words + kRange - 1) / kRange * p.range_stride);
    p.rows = as_is ? reinterpret_cast<const u32*>(x) : words;
    if (blocks.count == 1) {
        for (long row = 0; row < p.num_rows && !as_is; row++) load_row(words, x, row, p, num_in);
        few_rows<T>(p, panels);
        return;
    }
    const long chunks = (blocks.count + kBlocksAtOnce - 1) / kBlocksAtOnce;
    const long at_once = std::clamp<long>(chunks * panels / (4 * g_num_threads), 1, kPanelsAtOnce);
    const long groups = (panels + at_once - 1) / at_once;
    parallel_for_runs(p.num_rows, g_num_threads, [&](long row) { load_row(words, x, row, p, num_in); });
    parallel_for(chunks * groups, g_num_threads, [&](long task) {
        const long panel = task % groups * at_once;
        chunk<T>(p, blocks, task / groups * kBlocksAtOnce, panel, std::min(panel + at_once, panels));
    });
}

// What one thread does at a time: a row block chunk, or all rows of a small group, times some panels.
struct GroupTask {
    int64_t start, rows, group, from_block, panel, end_panel;
};

// Rows [offsets[g], offsets[g + 1]) times weight g, for all groups in one parallel region. at: where each weight is, or
// null where they follow each other.
template <class T>
void grouped_product(Product p, const u32* const* at, const T* x, const int64_t* offsets, long groups, long num_in) {
    static thread_local Scratch scratch;
    static thread_local std::vector<GroupTask> list;
    const long panels = (p.num_out + NR - 1) / NR, weight_words = panels * p.words / kWordsPerStep<T> * NR;
    p.range_stride = p.num_rows * kRow;
    u32* words = scratch.get<u32>((p.words + kRange - 1) / kRange * p.range_stride);
    p.rows = words;
    long chunks = 0;
    for (long g = 0; g < groups; g++)
        chunks += (offsets[g + 1] - offsets[g] + kBlocksAtOnce * kMaxRows<T> - 1) / (kBlocksAtOnce * kMaxRows<T>);
    const int threads = threads_for(p.num_rows * p.words * p.num_out, 1 << 16);
    const long at_once = std::clamp<long>(chunks * panels / (4 * threads), 1, kPanelsAtOnce);
    list.clear();
    for (long g = 0; g < groups; g++) {
        const long rows = offsets[g + 1] - offsets[g];
        if (rows == 0) continue;
        const long blocks = RowBlocks(rows, kMaxRows<T>).count, step = rows <= kWideRows ? kWide : at_once;
        for (long from = 0; from < blocks; from += kBlocksAtOnce)
            for (long panel = 0; panel < panels; panel += step)
                list.push_back({offsets[g], rows, g, from, panel, std::min(panel + step, panels)});
    }
    parallel_for_runs(p.num_rows, threads, [&](long row) { load_row(words, x, row, p, num_in); });
    const GroupTask* tasks = list.data();
    parallel_for(list.size(), threads, [&](long i) {
        const GroupTask& task = tasks[i];
        Product part = p;
        part.rows += task.start * kRow;
        part.weight = at == nullptr ? p.weight + task.group * weight_words : at[task.group];
        part.out = static_cast<char*>(p.out) + task.start * p.num_out * (p.out_float ? sizeof(float) : sizeof(T));
        part.num_rows = task.rows;
        const RowBlocks blocks(task.rows, kMaxRows<T>);
        if (blocks.count == 1) few_rows<T>(part, task.panel, task.end_panel);
        else chunk<T>(part, blocks, task.from_block, task.panel, task.end_panel);
    });
}

template <class T> void pack_weight(u32* to, const T* weight, long num_out, long num_in) {
    const long steps = (num_in + kElemsPerStep<T> - 1) / kElemsPerStep<T>;
    const long panels = (num_out + NR - 1) / NR;
    parallel_for(panels, g_num_threads, [&](long panel) {
        for (long i = 0; i < NR; i++) {
            const long n = panel * NR + i;
            for (long s = 0; s < steps; s++) {
                u32 step = 0;
                const long at = s * kElemsPerStep<T>;
                if (n < num_out)
                    std::memcpy(&step, weight + n * num_in + at, sizeof(T) * std::min<long>(kElemsPerStep<T>, num_in - at));
                to[(panel * steps + s) * NR + i] = step;
            }
        }
    });
}

}  // namespace

// Asks for huge pages; where there are none nothing changes.
PDS_EXPORT void pds_advise_huge(void* at, int64_t bytes) { (void)madvise(at, bytes, MADV_HUGEPAGE); }

PDS_EXPORT int pds_panel_width() { return NR; }

// How this library computes; part of the numerics id.
PDS_EXPORT const char* pds_isa() {
#ifdef PDS_DOT_BF16
    return "avx512-dot";
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
    if (rows == 0) return;
    Product p{nullptr, 0, static_cast<const u32*>(weight), bias, out, rows, num_out, num_in, out_float != 0};
    if (dtype == kFloat32) return product(p, static_cast<const float*>(x), num_in);
    p.words = (num_in + 1) / 2 * kWordsPerStep<bf16>;
    product(p, static_cast<const bf16*>(x), num_in);
}

// weight: one packed weight per group, one after the other; or null, then at[g] is group g's. offsets: groups + 1,
// ascending. Returns whether they end with `rows`; otherwise nothing is computed.
PDS_EXPORT int pds_grouped_linear(void* out, const void* x, const void* weight, const void* const* at,
                                  const int64_t* offsets, int64_t groups, int64_t rows, int64_t num_out, int64_t num_in,
                                  int dtype, int out_float) {
    if (offsets[0] != 0 || offsets[groups] != rows) return 0;
    if (rows == 0) return 1;
    Product p{nullptr, 0, static_cast<const u32*>(weight), nullptr, out, rows, num_out, num_in, out_float != 0};
    if (dtype == kBfloat16) p.words = (num_in + 1) / 2 * kWordsPerStep<bf16>;
    const u32* const* weights = weight != nullptr ? nullptr : reinterpret_cast<const u32* const*>(at);
    if (dtype == kFloat32) grouped_product(p, weights, static_cast<const float*>(x), offsets, groups, num_in);
    else grouped_product(p, weights, static_cast<const bf16*>(x), offsets, groups, num_in);
    return 1;
}
