// Varlen attention over 8-bit pages. q is quantised by (token, head), softmax weights times V's scales by row and
// span, so both products are sums of bytes, which are exact; floats are reduced in an order that follows positions
// alone, as over pages of floats (attention.cpp). A row's result depends on nothing but its q and what it sees.
#include <utility>

#include "blocks.h"
#include "dot.h"
#include "paged.h"

namespace {

constexpr int64_t kWorth = 1 << 20;
constexpr long kQWords = 64 + 16;            // from a q row's codes to the next's, for the largest head dim
constexpr long kWeightWords = kSpan / 4;     // from a row's weights to the next's
constexpr int kBlockWords = kBlock / 4;      // words of a block in such a row, and rows of fours in a block of V
constexpr float kFaintest = -64.0f;          // weights stop at 2^-64 of the running maximum's

#ifdef PDS_AVX512
constexpr int kMaxRows = 12;
constexpr int vectors_for(int rows) { return rows <= kFewRows ? 4 : 2; }  // vectors side by side in a tile
#else
constexpr int kMaxRows = 4;
constexpr int vectors_for(int) { return 2; }
#endif

// What an item works on: its q rows, one row block's scores and weights, the softmax's state.
struct Work {
    int rows, dim, padded_dim;
    RowBlocks blocks;
    u32* q;             // [rows][kQWords]: codes
    float* scores;      // [kMaxRows][kSpan]; then weights times V's scales
    u32* weights;       // [kMaxRows][kWeightWords]: their codes
    float* sums;        // [rows][padded_dim]
    float* totals;      // [rows][VW]
    float* scale;       // [rows]: of q, with the softmax's
    int32_t* offset;    // [rows]: what K's codes being 128 too large adds to a score
    float* top;         // [rows]: a whole number, so that powers of two between tops are exact
    float* rescale;     // [rows]
    float* weight_scale;  // [rows]
    int32_t* position;  // [rows]
    float* k_scales;    // [kSpan]
    float* v_scales;    // [kSpan]

    Work(Scratch& scratch, int num_rows, int head_dim) : rows(num_rows), dim(head_dim), blocks(num_rows, kMaxRows) {
        padded_dim = (dim + VW - 1) / VW * VW;
        const size_t n = rows, shared = kMaxRows * (kSpan + kWeightWords) + 2 * kSpan;
        float* at = scratch.get<float>(shared + n * (kQWords + padded_dim + VW + 6));
        const auto take = [&at](size_t count) { return std::exchange(at, at + count); };
        scores = take(kMaxRows * kSpan);
        weights = reinterpret_cast<u32*>(take(kMaxRows * kWeightWords));
        k_scales = take(kSpan), v_scales = take(kSpan);
        sums = take(n * padded_dim);
        q = reinterpret_cast<u32*>(take(n * kQWords));
        totals = take(n * VW);
        scale = take(n), top = take(n), rescale = take(n), weight_scale = take(n);
        offset = reinterpret_cast<int32_t*>(take(n));
        position = reinterpret_cast<int32_t*>(take(n));
    }
};

// dot4 in place: with the intrinsic, GCC 11 and 12 copy every accumulator twice a step, and some through memory.
PDS_INLINE void add_dot4(vi& acc, vi weights, vi x) {
#if defined(PDS_AVX512) && defined(__AVX512VNNI__)
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(weights), "v"(x));
#else
    acc = dot4(acc, weights, x);
#endif
}

// Rows of 4 bytes of the left side times vectors of 4 bytes of the right, steps in order: acc[r][v] += a[r][s] b[s][v].
// K is the unsigned side of q k^T; the weights are that of p v.
template <bool RIGHT_UNSIGNED, int MR, int COLS>
PDS_INLINE void step(vi (&acc)[MR][COLS], const u32* a, long a_row, const vi (&b)[COLS]) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
        const vi word = iset(a[r * a_row]);
#pragma GCC unroll 16
        for (int v = 0; v < COLS; v++) RIGHT_UNSIGNED ? add_dot4(acc[r][v], b[v], word) : add_dot4(acc[r][v], word, b[v]);
    }
}

// Scores of MR rows from `row` on, still without the row's own scale.
template <int MR> void score_rows(const Work& w, int row, const Span& span, long k_step) {
    constexpr int COLS = vectors_for(MR), GROUP = COLS / kBlockVectors;
    const u32* q = w.q + row * kQWords;
    const long steps = w.dim / 4;
    for (int block = span.from; block < span.to; block += GROUP) {
        vi acc[MR][COLS];
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++)
#pragma GCC unroll 16
            for (int v = 0; v < COLS; v++) acc[r][v] = iset(static_cast<u32>(w.offset[row + r]));
        if constexpr (MR <= kFewRows) call_up(span, block, GROUP, k_step, steps, static_cast<long>(w.dim) * kBlockWords);
        const u32* base[GROUP];
        for (int i = 0; i < GROUP; i++) base[i] = span.k[block + i];
        for (long s = 0; s < steps; s++) {
            vi k[COLS];
#pragma GCC unroll 16
            for (int v = 0; v < COLS; v++) k[v] = iload(base[v / kBlockVectors] + s * k_step + v % kBlockVectors * VW);
            step<true>(acc, q + s, kQWords, k);
        }
#pragma GCC unroll 16
        for (int v = 0; v < COLS; v++) {
            if (block * kBlock + v * VW >= kSpan) continue;
            const vf scale = vload(w.k_scales + block * kBlock + v * VW);
#pragma GCC unroll 16
            for (int r = 0; r < MR; r++)
                vstore(w.scores + r * kSpan + block * kBlock + v * VW, vmul(to_float(acc[r][v]), scale));
        }
    }
}

// Columns [col, col + COLS vectors) of sums = sums * rescale + weights * V.
template <int MR, int COLS, bool TAIL>
PDS_INLINE void weigh_columns(const Work& w, int row, int col, const Span& span, Mask mask) {
    vi acc[MR][COLS];
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 16
        for (int v = 0; v < COLS; v++) acc[r][v] = izero();
    for (int block = span.from; block < span.to; block++) {
        const u32* weights = w.weights + block * kBlockWords;
        const u32* base = span.v[block] + col;
#pragma GCC unroll 1
        for (int s = 0; s < kBlockWords; s++, base += w.dim) {
            vi v[COLS];
#pragma GCC unroll 16
            for (int i = 0; i < COLS; i++) v[i] = TAIL ? iload(base + i * VW, mask) : iload(base + i * VW);
            step<false>(acc, weights + s, kWeightWords, v);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++) {
        float* sums = w.sums + static_cast<long>(row + r) * w.padded_dim + col;
        const vf rescale = vset(w.rescale[row + r]), scale = vset(w.weight_scale[row + r]);
#pragma GCC unroll 16
        for (int v = 0; v < COLS; v++)
            vstore(sums + v * VW, fma(to_float(acc[r][v]), scale, vmul(vload(sums + v * VW), rescale)));
    }
}

template <int MR> void weigh_rows(const Work& w, int row, const Span& span) {
    constexpr int COLS = vectors_for(MR);
    int col = 0;
    for (; col + COLS * VW <= w.dim; col += COLS * VW) weigh_columns<MR, COLS, false>(w, row, col, span, first(VW));
    for (; col + VW <= w.dim; col += VW) weigh_columns<MR, 1, false>(w, row, col, span, first(VW));
    if (col < w.dim) weigh_columns<MR, 1, true>(w, row, col, span, first(w.dim - col));
}

struct Kernels {
    void (*score[kMaxRows + 1])(const Work&, int, const Span&, long) = {};
    void (*weigh[kMaxRows + 1])(const Work&, int, const Span&) = {};

    Kernels() { fill<kMaxRows>(); }
    template <int MR> void fill() {
        score[MR] = score_rows<MR>;
        weigh[MR] = weigh_rows<MR>;
        if constexpr (MR > 1) fill<MR - 1>();
    }
};

const Kernels kernels;

// 2^(score * scale - top), at least 2^kFaintest; relative error 1e-4, a fortieth of a code's. A NaN stays one. Rounded
// after the product, as the top was: the greatest score is then at most 0 from it, whatever its size.
PDS_INLINE vf weight_of(vf score, vf scale, vf top) {
    const vf x = vmax(vset(kFaintest), vsub(vmul(score, scale), top));
    const vf magic = vadd(x, vset(kMagic));
    const vf r = vsub(x, vsub(magic, vset(kMagic)));
    vf p = vset(5.51716685e-2f);
    p = fma(p, r, vset(2.42611125e-1f));
    p = fma(p, r, vset(6.93260968e-1f));
    p = fma(p, r, vset(9.99928057e-1f));
    return as_float(iadd(as_int(p), to_exponent(as_int(magic))));
}

// Bytes of whole numbers x + 2^23, in [0, 255].
PDS_INLINE void store_low_bytes(void* to, vf x) {
#ifdef PDS_AVX512
    _mm_storeu_si128(static_cast<__m128i*>(to), _mm512_cvtepi32_epi8(as_int(x)));
#else
    const vi low = _mm256_and_si256(as_int(x), _mm256_set1_epi32(255));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storel_epi64(static_cast<__m128i*>(to), _mm_packus_epi16(words, words));
#endif
}

// What a row sees of a span: positions [low, high).
struct Seen {
    int low, high;

    bool whole(int i) const { return i >= low && i + VW <= high; }
    bool none(int i) const { return i + VW <= low || i >= high; }
    // Calls body(i, x or `other` where it is not seen) for the vectors of [from, to) that hold something seen.
    template <class Load, class Body> PDS_INLINE void each(const Load& load, const Body& body) const {
        int i = low / VW * VW;
        for (; i < high && !whole(i); i += VW) body(i, load(i), false);
#pragma GCC unroll 4
        for (; i + VW <= high; i += VW) body(i, load(i), true);
        if (i < high) body(i, load(i), false);
    }
};

// The greatest score that a row sees; kLowest where it sees numbers only by name (NaN).
float greatest_score(const float* scores, Seen seen) {
    vf most = vset(kLowest);
    seen.each([&](int i) { return vload(scores + i); },
              [&](int i, vf score, bool whole) {
                  if (!whole) score = within(score, vset(kLowest), i, seen.low, seen.high);
                  most = vmax(score, most);
              });
    return max_lanes(most);
}

// NaN if a V scale that the row sees is one, else 0: a maximum would lose it.
float strangeness(const float* v_scales, Seen seen) {
    vf rest = vzero();
    for (int i = seen.low / VW * VW; i < seen.high; i += VW)
        rest = vadd(rest, within(vmul(vload(v_scales + i), vzero()), vzero(), i, seen.low, seen.high));
    return sum_lanes(rest);
}

// Takes the greatest score of a span into the running maximum.
void raise_top(const Work& w, int row, float most) {
    const float scale = w.scale[row], before = w.top[row];
    const float now = most == kLowest ? before : std::max(before, std::ceil(most * scale));
    w.rescale[row] = now == before ? 1.0f : before == kLowest ? 0.0f : first_lane(vexp2(vset(before - now)));
    w.top[row] = now;
}

// Scores that a row sees to weights times V's scales; returns the greatest.
float weigh_scores(const Work& w, int row, float* scores, Seen seen) {
    const vf top = vset(w.top[row]), scale = vset(w.scale[row]);
    vf total = vmul(vload(w.totals + row * VW), vset(w.rescale[row])), greatest = vzero();
    seen.each([&](int i) { return weight_of(vload(scores + i), scale, top); },
              [&](int i, vf weight, bool whole) {
                  vf scaled = vmul(weight, vload(w.v_scales + i));
                  if (!whole) {
                      weight = within(weight, vzero(), i, seen.low, seen.high);
                      scaled = within(scaled, vzero(), i, seen.low, seen.high);
                  }
                  total = vadd(total, weight);
                  greatest = vmax(greatest, scaled);
                  vstore(scores + i, scaled);
              });
    vstore(w.totals + row * VW, total);
    return max_lanes(greatest);
}

// Codes in [0, 255] of what a row sees, and 0 for the rest of the row block's blocks.
void put_weights(const Work& w, int row, int place, const Span& span, Seen seen, float greatest) {
    const float* scaled = w.scores + place * kSpan;
    auto* codes = reinterpret_cast<uint8_t*>(w.weights + place * kWeightWords);
    const bool none = greatest < 0x1p-118f;
    w.weight_scale[row] = none ? 0.0f : greatest / 255.0f;
    const vf inverse = vset(none ? 0.0f : 255.0f / greatest);
    const int from = span.from * kBlock, to = span.to * kBlock;
    const int begin = std::clamp(seen.low / VW * VW, from, to), end = std::clamp((seen.high + VW - 1) / VW * VW, begin, to);
    if (from < begin) std::memset(codes + from, 0, begin - from);
#pragma GCC unroll 4
    for (int i = begin; i < end; i += VW) store_low_bytes(codes + i, fma(vload(scaled + i), inverse, vset(0x1p23f)));
    if (end < to) std::memset(codes + end, 0, to - end);
}

// Scores of rows [row, end), one row block, to weights. Each step goes over all rows, so that none waits for itself.
void soften(const Work& w, int row, int end, const Span& span, int64_t window, bool strange) {
    Seen seen[kMaxRows];
    float most[kMaxRows];
    for (int r = row; r < end; r++) {
        const int64_t high = w.position[r] + 1 - span.origin;
        seen[r - row] = {static_cast<int>(std::clamp<int64_t>(window > 0 ? high - window : 0, 0, kSpan)),
                         static_cast<int>(std::clamp<int64_t>(high, 0, kSpan))};
        most[r - row] = greatest_score(w.scores + (r - row) * kSpan, seen[r - row]);
    }
    for (int r = row; r < end; r++) raise_top(w, r, most[r - row]);
    for (int r = row; r < end; r++) {
        most[r - row] = weigh_scores(w, r, w.scores + (r - row) * kSpan, seen[r - row]);
        if (strange) most[r - row] += strangeness(w.v_scales, seen[r - row]);
    }
    for (int r = row; r < end; r++) put_weights(w, r, r - row, span, seen[r - row], most[r - row]);
}

template <class T> void gather_q(const Work& w, const Call& call, const Item& item, int64_t kv_head) {
    const int64_t group = call.group(), row0 = item.first_row(call), position0 = item.first_position(call);
    for (int row = 0; row < w.rows; row++) {
        const int64_t head = (row0 + row / group) * call.num_heads + kv_head * group + row % group;
        const T* q = static_cast<const T*>(call.q) + head * w.dim;
        const Scale scale(top_of(q, 0, w.padded_dim, w.dim));
        auto* codes = reinterpret_cast<int8_t*>(w.q + row * kQWords);
        w.offset[row] = -128 * put_codes(codes, q, 0, w.padded_dim, w.dim, scale.inverse);
        w.scale[row] = std::isnan(scale.scale) ? NAN : scale.scale * call.scale;
        w.position[row] = static_cast<int32_t>(position0 + row / group);
    }
    std::fill_n(w.sums, static_cast<size_t>(w.rows) * w.padded_dim, 0.0f);
    std::fill_n(w.totals, static_cast<size_t>(w.rows) * VW, 0.0f);
    std::fill_n(w.top, w.rows, kLowest);
}

template <class T> void store_out(const Work& w, const Call& call, const Item& item, int64_t kv_head) {
    const int64_t group = call.group(), row0 = item.first_row(call);
    for (int row = 0; row < w.rows; row++) {
        T* to = static_cast<T*>(call.out) +
                ((row0 + row / group) * call.num_heads + kv_head * group + row % group) * w.dim;
        const vf total = vset(sum_lanes(vload(w.totals + row * VW)));
        const float* sums = w.sums + static_cast<long>(row) * w.padded_dim;
        for_vectors(w.dim, [&](int64_t d, auto m) { store_rounded(to + d, vdiv(vload(sums + d), total), m); });
    }
}

// Copies a block's scales; a NaN becomes the plain one. False where there is one.
bool copy_scales(float* to, const char* from) {
    alignas(64) float scales[kBlock];
    std::memcpy(scales, from, sizeof scales);
    vf rest = vzero();
    for (int i = 0; i < kBlock; i += VW) {
        rest = fma(vload(scales + i), vzero(), rest);
        vstore(to + i, vload(scales + i));
    }
    if (!std::isnan(sum_lanes(rest))) return true;
    for (int i = 0; i < kBlock; i++)
        if (!std::isfinite(scales[i])) to[i] = NAN;
    return false;
}

// The span's bases and scales; false for a page outside the pool. strange: V has a scale that is a NaN.
bool find(Span& span, bool& strange, const Work& w, const Call& call, int32_t seq, int64_t kv_head, int64_t low, int64_t high) {
    const KVDesc& kv = call.kv;
    const int64_t head = kv_head * w.dim * kv.page_size;
    const char* scales[kBlocks][2];
    const auto found = [&](int block, const char* k, const char* v, int64_t row) {
        span.k[block] = reinterpret_cast<const u32*>(k + head + row * 4);
        span.v[block] = reinterpret_cast<const u32*>(v + head + row * w.dim);
        const int64_t at = kv.codes() + (kv_head * kv.page_size + row) * sizeof(float);
        scales[block][0] = k + at, scales[block][1] = v + at;
    };
    if (!find_span(span, call, seq, low, high, 1, found)) return false;
    strange = false;
    for (int block = span.first; block < span.last; block++) {
        copy_scales(w.k_scales + block * kBlock, scales[block][0]);
        strange |= !copy_scales(w.v_scales + block * kBlock, scales[block][1]);
    }
    return true;
}

template <class T> bool attend(const Call& call, const Item& item, int64_t kv_head) {
    static thread_local Scratch scratch;
    const Work w(scratch, static_cast<int>(item.num_tokens * call.group()), static_cast<int>(call.kv.head_dim));
    gather_q<T>(w, call, item, kv_head);
    const int64_t high = w.position[w.rows - 1] + 1;
    const int64_t low = call.window > 0 ? std::max<int64_t>(w.position[0] - call.window + 1, 0) : 0;
    Span span;
    bool strange = false;
    for (span.origin = low / kSpan * kSpan; span.origin < high; span.origin += kSpan) {
        if (!find(span, strange, w, call, item.seq, kv_head, low, high)) return false;
        for (long block = 0; block < w.blocks.count; block++) {
            const int row = static_cast<int>(w.blocks.start(block)), end = row + static_cast<int>(w.blocks.size(block));
            if (!narrow(span, w.position[row], w.position[end - 1], call.window)) continue;
            kernels.score[end - row](w, row, span, call.kv.page_size);
            soften(w, row, end, span, call.window, strange);
            kernels.weigh[end - row](w, row, span);
        }
    }
    store_out<T>(w, call, item, kv_head);
    return true;
}

template <class T> int attention(const Call& call) {
    return for_items(call, kWorth, [&](const Item& item, int64_t head) { return attend<T>(call, item, head); });
}

}  // namespace

int attention8(const Call& call, int dtype) {
    return dtype == kFloat32 ? attention<float>(call) : attention<bf16>(call);
}
