// Attention over latent rows (MLA): one row of C elements per position is key of all heads, and its first `rank`
// elements are their value. Scores and sums run over positions one by one, whatever pages, chunks and neighbours.
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace {

constexpr int64_t kWorth = 1 << 14;
constexpr int kTogether = 4;  // rows, or vectors of a row, with chains of their own

// A page is [layer][row][C] here: what common.h calls K and V of a layer is one run of rows.
template <class T> struct LatentRows {
    T* storage;
    const KVDesc& kv;
    int64_t layer;

    int64_t width() const { return 2 * kv.num_kv_heads * kv.head_dim; }
    T* at(int64_t page, int64_t row) const {
        return storage + page * kv.page_stride + layer * 2 * kv.part() + row * width();
    }
};

template <class T, int N> PDS_INLINE void dots(float* to, const T* q, const T* const* rows, int64_t cols) {
    vf sums[N];
    for (int n = 0; n < N; n++) sums[n] = vzero();
    for_vectors(cols, [&](int64_t i, auto m) {
        const vf left = load_as_float(q + i, m);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sums[n] = fma(left, load_as_float(rows[n] + i, m), sums[n]);
    });
    for (int n = 0; n < N; n++) to[n] = sum_lanes(sums[n]);
}

// Scores to weights that sum to 1 but for the factor that it returns.
float soften(float* scores, int64_t count, float scale) {
    float most = scores[0];
    for (int64_t i = 1; i < count; i++) most = scores[i] > most ? scores[i] : most;
    float poison = 0;
    for (int64_t i = 0; i < count; i++) poison += 0.0f * scores[i];
    for_vectors(count, [&](int64_t i, auto m) {
        const vf x = vmul(vsub(load_as_float(scores + i, m), vset(most)), vset(scale));
        store_rounded(scores + i, vexp(x), m);
    });
    float sum = poison;
    for (int64_t i = 0; i < count; i++) sum += scores[i];
    return 1.0f / sum;
}

template <class T>
void weigh(T* out, const float* weights, const T* const* rows, int64_t count, int64_t cols, float factor) {
    int64_t at = 0;
    for (; at + kTogether * VW <= cols; at += kTogether * VW) {
        vf sums[kTogether];
        for (int v = 0; v < kTogether; v++) sums[v] = vzero();
        for (int64_t s = 0; s < count; s++) {
            const vf weight = vset(weights[s]);
#pragma GCC unroll 4
            for (int v = 0; v < kTogether; v++) sums[v] = fma(weight, load_as_float(rows[s] + at + v * VW), sums[v]);
        }
        for (int v = 0; v < kTogether; v++) store_rounded(out + at + v * VW, vmul(sums[v], vset(factor)));
    }
    for_vectors(cols - at, [&](int64_t i, auto m) {
        vf sum = vzero();
        for (int64_t s = 0; s < count; s++) sum = fma(vset(weights[s]), load_as_float(rows[s] + at + i, m), sum);
        store_rounded(out + at + i, vmul(sum, vset(factor)), m);
    });
}

// q is [head][token][C], out is [head][token][rank].
template <class T>
int attend(T* out, const T* q, const LatentRows<T>& latent, const AttentionDesc& meta, int64_t num_heads, int64_t rank,
           float scale) {
    const KVDesc& kv = latent.kv;
    for (int64_t b = 0; b < meta.num_seqs; b++)
        for (int64_t p = 0; p * kv.page_size < meta.context_lens[b]; p++) {
            const int32_t page = meta.block_tables[b * meta.max_pages + p];
            if (p >= meta.max_pages || page < 0 || page >= kv.num_pages) return kOutOfPool;
        }
    const int64_t tokens = meta.query_starts[meta.num_seqs], cols = latent.width();
    parallel_for(num_heads * tokens, threads_for(num_heads * tokens * cols * 16, kWorth), [&](int64_t task) {
        static thread_local std::vector<float> scores;
        static thread_local std::vector<const T*> rows;
        const int64_t t = task % tokens;
        int64_t b = 0;
        while (meta.query_starts[b + 1] <= t) b++;
        const int64_t count = meta.context_lens[b] - (meta.query_starts[b + 1] - 1 - t);
        scores.resize(count);
        rows.resize(count);
        for (int64_t s = 0; s < count; s++)
            rows[s] = latent.at(meta.block_tables[b * meta.max_pages + s / kv.page_size], s % kv.page_size);
        int64_t s = 0;
        for (; s + kTogether <= count; s += kTogether) dots<T, kTogether>(&scores[s], q + task * cols, &rows[s], cols);
        for (; s < count; s++) dots<T, 1>(&scores[s], q + task * cols, &rows[s], cols);
        const float factor = soften(scores.data(), count, scale);
        weigh(out + task * rank, scores.data(), rows.data(), count, rank, factor);
    });
    return kOk;
}

template <class T> int write(const LatentRows<T>& latent, const T* rows, const int32_t* slots, int64_t tokens) {
    const KVDesc& kv = latent.kv;
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] < 0 || slots[t] >= kv.num_pages * kv.page_size) return kOutOfPool;
    for (int64_t t = 0; t < tokens; t++)
        std::memcpy(latent.at(slots[t] / kv.page_size, slots[t] % kv.page_size), rows + t * latent.width(),
                    sizeof(T) * latent.width());
    return kOk;
}

template <class T> LatentRows<T> rows_of(const KVDesc& kv, int64_t layer) {
    return LatentRows<T>{static_cast<T*>(kv.storage), kv, layer};
}

}  // namespace

PDS_EXPORT int pds_write_latent(const KVDesc* kv, const void* rows, int64_t layer, const int32_t* slots, int64_t tokens,
                                int dtype) {
    if (dtype == kFloat32) return write(rows_of<float>(*kv, layer), (const float*)rows, slots, tokens);
    return write(rows_of<bf16>(*kv, layer), (const bf16*)rows, slots, tokens);
}

PDS_EXPORT int pds_latent_attention(void* out, const void* q, const KVDesc* kv, int64_t layer, const AttentionDesc* meta,
                                    int64_t num_heads, int64_t rank, float scale, int dtype) {
    if (dtype == kFloat32)
        return attend((float*)out, (const float*)q, rows_of<float>(*kv, layer), *meta, num_heads, rank, scale);
    return attend((bf16*)out, (const bf16*)q, rows_of<bf16>(*kv, layer), *meta, num_heads, rank, scale);
}
