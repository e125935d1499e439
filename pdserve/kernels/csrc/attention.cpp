// Varlen attention over pages of floats (bytes: attention8.cpp). Keys come in spans of kSpan positions at absolute
// multiples of kSpan: scores of a span, softmax against the running maximum, then p v. Every reduction follows
// positions alone, so a row's result does not depend on its tile, batch, chunk, page size or thread.
#include <utility>

#include "paged.h"

namespace {

constexpr int64_t kWorth = 1 << 18;
constexpr long kQRow = 256 + 16;          // words from a q row to the next, for the largest head dim

#ifdef PDS_AVX512
template <class T> constexpr int kMaxRows = 12;
constexpr int vectors_for(int rows) { return rows <= kFewRows ? 4 : 2; }  // vectors side by side in a tile
#else
template <class T> constexpr int kMaxRows = kWidens<T> ? 4 : 6;
constexpr int vectors_for(int) { return 2; }
#endif
// Where q is widened anyway, the scale goes into it.
template <class T> constexpr bool kScaledQ = std::is_same_v<Left<T>, float>;
// Words of a row of softmax weights from one row to the next.
template <class T> constexpr long kWeightRow = kSpan / kElemsPerWord<T>;

// What an item works on: its q rows, one row block's scores and weights, the softmax's state.
template <class T> struct Work {
    int rows, dim, padded_dim, num_blocks, base, extra;
    u32* q;          // [rows][kQRow]
    float* scores;   // [kMaxRows][kSpan]
    Left<T>* weights;  // [kMaxRows][kSpan]; the scores themselves where they are floats too
    float* sums;     // [rows][padded_dim]
    float* totals;   // [rows][VW]
    float* top;      // [rows]
    float* rescale;  // [rows]
    int32_t* position;  // [rows]
    u32* last_pair;  // [dim]: V of the last position where its neighbour is beyond the context

    Work(Scratch& scratch, int num_rows, int head_dim) : rows(num_rows), dim(head_dim) {
        padded_dim = (dim + VW - 1) / VW * VW;
        num_blocks = (rows + kMaxRows<T> - 1) / kMaxRows<T>;
        base = rows / num_blocks, extra = rows % num_blocks;
        const size_t score_words = kMaxRows<T> * kSpan;
        float* at = scratch.get<float>(2 * score_words + (kQRow + padded_dim + VW + 3) * rows + padded_dim);
        const auto take = [&at](size_t count) { return std::exchange(at, at + count); };
        scores = take(score_words);
        weights = reinterpret_cast<Left<T>*>(sizeof(Left<T>) == 4 ? scores : take(score_words / 2));
        sums = take(static_cast<size_t>(rows) * padded_dim);
        q = reinterpret_cast<u32*>(take(static_cast<size_t>(rows) * kQRow));
        totals = take(static_cast<size_t>(rows) * VW);
        last_pair = reinterpret_cast<u32*>(take(padded_dim));
        top = take(rows), rescale = take(rows);
        position = reinterpret_cast<int32_t*>(take(rows));
    }

    int start(int block) const { return block * base + std::min(block, extra); }
    int size(int block) const { return base + (block < extra); }
};

template <class T, int MR> void score_rows(const u32* q, long steps, const Span& span, long k_step, float* scores) {
    constexpr int COLS = vectors_for(MR), GROUP = COLS / kBlockVectors;
    for (int block = span.from; block < span.to; block += GROUP) {
        vf acc[MR][COLS];
        for (int r = 0; r < MR; r++)
            for (int v = 0; v < COLS; v++) acc[r][v] = vzero();
        if constexpr (MR <= kFewRows) call_up(span, block, GROUP, k_step, steps, steps * kBlock);
        tile<T, MR, GROUP, kBlockVectors, kQRow, 1>(acc, q, span.k + block, k_step, steps);
        for (int r = 0; r < MR; r++)
            for (int v = 0; v < COLS && block * kBlock + v * VW < kSpan; v++)
                vstore(scores + r * kSpan + block * kBlock + v * VW, acc[r][v]);
    }
}

// Columns [col, col + COLS vectors) of sums = sums * rescale + weights * V.
template <class T, int MR, int COLS, bool TAIL>
PDS_INLINE void weigh_columns(const Work<T>& w, int row, int col, const Span& span, const u32* last_pair, Mask mask) {
    vf acc[MR][COLS];
    float* sums = w.sums + static_cast<long>(row) * w.padded_dim + col;
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < COLS; v++)
            acc[r][v] = vmul(vload(sums + r * w.padded_dim + v * VW), vset(w.rescale[row + r]));
    const u32* weights = reinterpret_cast<const u32*>(w.weights);
    for (int block = span.from; block < span.to; block++) {
        const int count = std::min(kBlock, span.end - block * kBlock);
        const u32* base = span.v[block] + col;
        const u32* first_weight = weights + block * (kBlock / kElemsPerWord<T>);
        const int steps = count / kElemsPerStep<T>;
        tile<T, MR, 1, COLS, kWeightRow<T>, 1, TAIL>(acc, first_weight, &base, w.dim, steps, mask);
        if (count % kElemsPerStep<T> == 0) continue;
        base = last_pair + col;
        tile<T, MR, 1, COLS, kWeightRow<T>, 1, TAIL>(acc, first_weight + steps * kWordsPerStep<T>, &base, w.dim, 1, mask);
    }
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < COLS; v++) vstore(sums + r * w.padded_dim + v * VW, acc[r][v]);
}

template <class T, int MR> void weigh_rows(const Work<T>& w, int row, const Span& span) {
    constexpr int COLS = vectors_for(MR);
    int col = 0;
    for (; col + COLS * VW <= w.dim; col += COLS * VW)
        weigh_columns<T, MR, COLS, false>(w, row, col, span, w.last_pair, first(VW));
    for (; col + VW <= w.dim; col += VW) weigh_columns<T, MR, 1, false>(w, row, col, span, w.last_pair, first(VW));
    if (col < w.dim) weigh_columns<T, MR, 1, true>(w, row, col, span, w.last_pair, first(w.dim - col));
}

template <class T> struct Kernels {
    using ScoreFn = void (*)(const u32*, long, const Span&, long, float*);
    using WeighFn = void (*)(const Work<T>&, int, const Span&);
    ScoreFn score[kMaxRows<T> + 1] = {};
    WeighFn weigh[kMaxRows<T> + 1] = {};

    Kernels() { fill<kMaxRows<T>>(); }
    template <int MR> void fill() {
        score[MR] = score_rows<T, MR>;
        weigh[MR] = weigh_rows<T, MR>;
        if constexpr (MR > 1) fill<MR - 1>();
    }
};

template <class T> const Kernels<T> kernels;

// Scores of a row, in powers of two, to softmax weights against the running maximum; positions outside [low, high)
// of the span weigh 0. place: the row's within its row block.
template <class T>
void soften(const Work<T>& w, int row, int place, const Span& span, int low, int high, float scale) {
    const float* scores = w.scores + place * kSpan;
    Left<T>* weights = w.weights + place * kSpan;
    const int from = span.from * kBlock, to = span.to * kBlock;
    const auto score = [&](int i) {
        if constexpr (kScaledQ<T>) return vload(scores + i);
        return vmul(vload(scores + i), vset(scale));
    };
    const auto whole = [&](int i) { return i >= low && i + VW <= high; };
    vf most = vset(kLowest);
    const int end = std::min(to, high);
    for (int i = std::max(from, low / VW * VW); i < end; i += VW)
        most = vmax(whole(i) ? score(i) : within(score(i), vset(kLowest), i, low, high), most);
    const float before = w.top[row];
    const float now = std::max(before, max_lanes(most));
    const float rescale = now == before ? 1.0f : before == kLowest ? 0.0f : first_lane(vexp2(vset(before - now)));
    const vf top = vset(now);
    vf total = vmul(vload(w.totals + row * VW), vset(rescale));
    for (int i = from; i < to; i += VW) {
        vf weight = vzero();
        if (i + VW > low && i < high) {
            weight = vexp2(vsub(score(i), top));
            if (!whole(i)) weight = within(weight, vzero(), i, low, high);
        }
        total = vadd(total, weight);
        store_rounded(weights + i, weight);
    }
    vstore(w.totals + row * VW, total);
    w.top[row] = now;
    w.rescale[row] = rescale;
}

template <class T> void gather_q(const Work<T>& w, const Call& call, const Item& item, int64_t kv_head) {
    const int64_t group = call.group(), row0 = item.first_row(call), position0 = item.first_position(call);
    for (int row = 0; row < w.rows; row++) {
        const int64_t head = (row0 + row / group) * call.num_heads + kv_head * group + row % group;
        load_words(w.q + row * kQRow, static_cast<const T*>(call.q) + head * w.dim, w.dim);
        if constexpr (kScaledQ<T>)
            for (int d = 0; d < w.dim; d++) reinterpret_cast<float*>(w.q + row * kQRow)[d] *= call.scale;
        w.position[row] = static_cast<int32_t>(position0 + row / group);
    }
    std::fill_n(w.sums, static_cast<size_t>(w.rows) * w.padded_dim, 0.0f);
    std::fill_n(w.totals, static_cast<size_t>(w.rows) * VW, 0.0f);
    std::fill_n(w.top, w.rows, kLowest);
}

template <class T> void store_out(const Work<T>& w, const Call& call, const Item& item, int64_t kv_head) {
    const int64_t group = call.group(), row0 = item.first_row(call);
    for (int row = 0; row < w.rows; row++) {
        T* to = static_cast<T*>(call.out) +
                ((row0 + row / group) * call.num_heads + kv_head * group + row % group) * w.dim;
        const vf total = vset(sum_lanes(vload(w.totals + row * VW)));
        const float* sums = w.sums + static_cast<long>(row) * w.padded_dim;
        int d = 0;
        for (; d + VW <= w.dim; d += VW) store_rounded(to + d, vdiv(vload(sums + d), total));
        if (d < w.dim) store_rounded(to + d, vdiv(vload(sums + d), total), first(w.dim - d));
    }
}

// The span's bases, and the pair that ends inside the context; false for a page outside the pool.
template <class T>
bool find(Span& span, const Work<T>& w, const Call& call, int32_t seq, int64_t kv_head, int64_t low, int64_t high) {
    const int64_t head = kv_head * w.dim * call.kv.page_size;
    // A block's row offset: S runs fastest in K (in pairs for bfloat16), slowest in V.
    const auto found = [&](int block, const char* k, const char* v, int64_t row) {
        span.k[block] = reinterpret_cast<const u32*>(reinterpret_cast<const T*>(k) + head) + row;
        span.v[block] = reinterpret_cast<const u32*>(reinterpret_cast<const T*>(v) + head + row * w.dim);
    };
    if (!find_span(span, call, seq, low, high, sizeof(T), found)) return false;
    if (sizeof(T) == 2 && span.end % 2 == 1) {
        const u32* pair = span.v[span.last - 1] + (span.end % kBlock) / 2 * w.dim;
        for (int d = 0; d < w.dim; d++) w.last_pair[d] = pair[d] & 0xffffu;
    }
    return true;
}

template <class T> bool attend(const Call& call, const Item& item, int64_t kv_head) {
    static thread_local Scratch scratch;
    const Work<T> w(scratch, static_cast<int>(item.num_tokens * call.group()), static_cast<int>(call.kv.head_dim));
    gather_q(w, call, item, kv_head);
    const int64_t high = w.position[w.rows - 1] + 1;
    const int64_t low = call.window > 0 ? std::max<int64_t>(w.position[0] - call.window + 1, 0) : 0;
    const long steps = w.dim / kElemsPerStep<T>;
    Span span;
    for (span.origin = low / kSpan * kSpan; span.origin < high; span.origin += kSpan) {
        if (!find(span, w, call, item.seq, kv_head, low, high)) return false;
        for (int block = 0; block < w.num_blocks; block++) {
            const int row = w.start(block), end = row + w.size(block);
            if (!narrow(span, w.position[row], w.position[end - 1], call.window)) continue;
            kernels<T>.score[end - row](w.q + row * kQRow, steps, span, call.kv.page_size, w.scores);
            for (int r = row; r < end; r++) {
                const int64_t seen = w.position[r] + 1 - span.origin;
                const int64_t start = call.window > 0 ? seen - call.window : 0;
                soften(w, r, r - row, span, static_cast<int>(std::max<int64_t>(start, 0)),
                       static_cast<int>(std::clamp<int64_t>(seen, 0, kSpan)), call.scale);
            }
            kernels<T>.weigh[end - row](w, row, span);
        }
    }
    store_out(w, call, item, kv_head);
    return true;
}

template <class T> int attention(const Call& call) {
    return for_items(call, kWorth, [&](const Item& item, int64_t head) { return attend<T>(call, item, head); });
}

}  // namespace

PDS_EXPORT int pds_paged_attention(void* out, const void* q, const KVDesc* kv, int64_t layer, const AttentionDesc* meta,
                                   int64_t num_heads, float scale, int64_t window, int dtype) {
    const Call call{q, out, *kv, *meta, layer, num_heads, scale * 1.44269504f, window};
    if (kv->kind == kInt8Pages) return attention8(call, dtype);
    return dtype == kFloat32 ? attention<float>(call) : attention<bf16>(call);
}
