// Rotary embedding, the head norms before it and the write of K and V into pages after it.
#include "parallel.h"
#include "simd.h"

namespace {

constexpr int kMaxHeadDim = 256;
constexpr int64_t kWorth = 1 << 14;

PDS_INLINE float widen(float x) { return x; }
PDS_INLINE float widen(bf16 x) {
    const u32 bits = static_cast<u32>(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

// One head in float32, on its way from the projection to a page or to q.
struct Head {
    alignas(64) float x[kMaxHeadDim];
    int dim;

    template <class T> PDS_INLINE void load(const T* from) {
        for (int i = 0; i < dim; i++) x[i] = widen(from[i]);
    }

    template <class T> PDS_INLINE void store(T* to) const {
        int i = 0;
        for (; i + VW <= dim; i += VW) store_rounded(to + i, vload(x + i));
        if (i < dim) store_rounded(to + i, vload(x + i), first(dim - i));
    }

    // RMS norm over the head, with the rounding of norm_row (elementwise.cpp).
    template <class T> PDS_INLINE void norm(const T* weight, float eps) {
        vf squares = vzero();
        for (int i = 0; i < dim; i += VW) {
            const vf v = vload(x + i, first(dim - i < VW ? dim - i : VW));
            squares = fma(v, v, squares);
        }
        const vf scale = vset(1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(dim) + eps));
        for (int i = 0; i < dim; i += VW) {
            const Mask m = first(dim - i < VW ? dim - i : VW);
            const vf normed = rounded<T>(vmul(vload(x + i, m), scale));
            vstore(x + i, rounded<T>(vmul(normed, load_as_float(weight + i, m))), m);
        }
    }

    PDS_INLINE void rotate(const float* cos, const float* sin) {
        const int half = dim / 2;
        for (int i = 0; i < half; i++) {
            const float low = x[i], high = x[i + half];
            x[i] = low * cos[i] - high * sin[i];
            x[i + half] = high * cos[i + half] + low * sin[i + half];
        }
    }
};

// Where a slot's row lies in a layer.
struct Row {
    int64_t k, v, row;
};

template <class T> struct Pages {
    T* storage;
    const KVDesc& kv;
    int64_t layer;

    Row at(int64_t slot) const {
        const int64_t base = slot / kv.page_size * kv.page_stride + layer * 2 * kv.part();
        return {base, base + kv.part(), slot % kv.page_size};
    }

    // float32: K [K, D, S], V [K, S, D].
    PDS_INLINE void put_k(const Row& to, int64_t head, const Head& k, float) const {
        float* column = storage + to.k + head * kv.head_dim * kv.page_size + to.row;
        for (int d = 0; d < k.dim; d++) column[d * kv.page_size] = k.x[d];
    }
    PDS_INLINE void put_v(const Row& to, int64_t head, const float* v) const {
        std::memcpy(storage + to.v + (head * kv.page_size + to.row) * kv.head_dim, v, sizeof(float) * kv.head_dim);
    }

    // bfloat16: K [K, D/2, S, 2], V [K, S/2, D, 2].
    PDS_INLINE void put_k(const Row& to, int64_t head, const Head& k, bf16) const {
        alignas(64) bf16 rounded_k[kMaxHeadDim];
        k.store(rounded_k);
        T* column = storage + to.k + head * kv.head_dim * kv.page_size + to.row * 2;
        for (int d = 0; d < k.dim; d += 2) std::memcpy(column + d * kv.page_size, rounded_k + d, sizeof(u32));
    }
    PDS_INLINE void put_v(const Row& to, int64_t head, const bf16* v) const {
        T* pair = storage + to.v + (head * kv.page_size + to.row - to.row % 2) * kv.head_dim + to.row % 2;
        for (int64_t d = 0; d < kv.head_dim; d++) pair[d * 2] = v[d];
    }
};

bool inside(const KVDesc& kv, const int32_t* slots, int64_t tokens) {
    const int64_t end = kv.num_pages * kv.page_size;
    for (int64_t t = 0; t < tokens; t++)
        if (slots[t] < 0 || slots[t] >= end) return false;
    return true;
}

template <class T> void rope_rows(T* x, const float* cos, const float* sin, int64_t tokens, int64_t heads, int64_t dim) {
    parallel_for_runs(tokens, threads_for(tokens * heads * dim, kWorth), [&](int64_t t) {
        Head head;
        head.dim = static_cast<int>(dim);
        for (int64_t h = 0; h < heads; h++) {
            head.load(x + (t * heads + h) * dim);
            head.rotate(cos + t * dim, sin + t * dim);
            head.store(x + (t * heads + h) * dim);
        }
    });
}

template <class T>
int write_rows(const KVDesc& kv, const T* k, const T* v, int64_t layer, const int32_t* slots, int64_t tokens) {
    if (!inside(kv, slots, tokens)) return kOutOfPool;
    const Pages<T> pages{static_cast<T*>(kv.storage), kv, layer};
    const int64_t width = kv.num_kv_heads * kv.head_dim;
    parallel_for_runs(tokens, threads_for(tokens * width, kWorth), [&](int64_t t) {
        Head head;
        head.dim = static_cast<int>(kv.head_dim);
        const Row to = pages.at(slots[t]);
        for (int64_t h = 0; h < kv.num_kv_heads; h++) {
            head.load(k + t * width + h * kv.head_dim);
            pages.put_k(to, h, head, T());
            pages.put_v(to, h, v + t * width + h * kv.head_dim);
        }
    });
    return kOk;
}

template <class T>
int rope_write(T* q_out, const T* qkv, const float* cos, const float* sin, const KVDesc& kv, int64_t layer,
               const int32_t* slots, int64_t tokens, int64_t num_heads, const T* q_norm, const T* k_norm, float eps) {
    if (!inside(kv, slots, tokens)) return kOutOfPool;
    const Pages<T> pages{static_cast<T*>(kv.storage), kv, layer};
    const int64_t dim = kv.head_dim, width = (num_heads + 2 * kv.num_kv_heads) * dim;
    parallel_for_runs(tokens, threads_for(tokens * width, kWorth), [&](int64_t t) {
        Head head;
        head.dim = static_cast<int>(dim);
        const T* row = qkv + t * width;
        const Row to = pages.at(slots[t]);
        for (int64_t h = 0; h < num_heads + kv.num_kv_heads; h++) {
            const bool is_q = h < num_heads;
            const T* weight = is_q ? q_norm : k_norm;
            head.load(row + h * dim);
            if (weight != nullptr) head.norm(weight, eps);
            head.rotate(cos + t * dim, sin + t * dim);
            if (is_q) head.store(q_out + (t * num_heads + h) * dim);
            else pages.put_k(to, h - num_heads, head, T());
        }
        for (int64_t h = 0; h < kv.num_kv_heads; h++)
            pages.put_v(to, h, row + (num_heads + kv.num_kv_heads + h) * dim);
    });
    return kOk;
}

}  // namespace

// In place.
PDS_EXPORT void pds_apply_rope(void* x, const float* cos, const float* sin, int64_t tokens, int64_t heads, int64_t dim,
                               int dtype) {
    if (dtype == kFloat32) rope_rows((float*)x, cos, sin, tokens, heads, dim);
    else rope_rows((bf16*)x, cos, sin, tokens, heads, dim);
}

PDS_EXPORT int pds_write_kv(const KVDesc* kv, const void* k, const void* v, int64_t layer, const int32_t* slots,
                            int64_t tokens, int dtype) {
    if (dtype == kFloat32) return write_rows(*kv, (const float*)k, (const float*)v, layer, slots, tokens);
    return write_rows(*kv, (const bf16*)k, (const bf16*)v, layer, slots, tokens);
}

PDS_EXPORT int pds_rope_and_write_kv(void* q_out, const void* qkv, const float* cos, const float* sin, const KVDesc* kv,
                                     int64_t layer, const int32_t* slots, int64_t tokens, int64_t num_heads,
                                     const void* q_norm, const void* k_norm, float eps, int dtype) {
    if (dtype == kFloat32)
        return rope_write((float*)q_out, (const float*)qkv, cos, sin, *kv, layer, slots, tokens, num_heads,
                          (const float*)q_norm, (const float*)k_norm, eps);
    return rope_write((bf16*)q_out, (const bf16*)qkv, cos, sin, *kv, layer, slots, tokens, num_heads,
                      (const bf16*)q_norm, (const bf16*)k_norm, eps);
}
