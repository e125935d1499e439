// Rotary embedding, the head norms before it and the write of K and V into pages after it.
#include <limits>

#include "dot.h"
#include "parallel.h"

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

Row row_at(const KVDesc& kv, int64_t layer, int64_t slot) {
    const int64_t base = slot / kv.page_size * kv.page_stride + layer * 2 * kv.part();
    return {base, base + kv.part(), slot % kv.page_size};
}

// Pages of the rows' own dtype.
template <class T> struct Pages {
    T* storage;
    const KVDesc& kv;
    int64_t layer;

    Pages(const KVDesc& desc, int64_t of) : storage(static_cast<T*>(desc.storage)), kv(desc), layer(of) {}

    Row at(int64_t slot) const { return row_at(kv, layer, slot); }

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

// Pages of int8: K [K, D/4, S, 4] of codes + 128, V [K, S/4, D, 4] of codes, each followed by float32 scales [K, S].
// A row of a head has a scale of its own, so that its bits depend on nothing but itself. Keys are rounded to T first.
template <class T> struct Pages8 {
    uint8_t* storage;
    const KVDesc& kv;
    int64_t layer;

    Pages8(const KVDesc& desc, int64_t of) : storage(static_cast<uint8_t*>(desc.storage)), kv(desc), layer(of) {}

    Row at(int64_t slot) const { return row_at(kv, layer, slot); }

    PDS_INLINE void put_k(const Row& to, int64_t head, const Head& k, T) const {
        alignas(64) T rounded_k[kMaxHeadDim];
        k.store(rounded_k);
        alignas(64) int8_t codes[kMaxHeadDim + VW];
        put_scale(to.k, to.row, head, quantised(codes, rounded_k));
        uint8_t* column = storage + to.k + head * kv.head_dim * kv.page_size + to.row * 4;
        for (int d = 0; d < k.dim; d += 4) {
            u32 four;
            std::memcpy(&four, codes + d, sizeof four);
            four ^= 0x80808080u;
            std::memcpy(column + d * kv.page_size, &four, sizeof four);
        }
    }

    PDS_INLINE void put_v(const Row& to, int64_t head, const T* v) const {
        alignas(64) int8_t codes[kMaxHeadDim + VW];
        put_scale(to.v, to.row, head, quantised(codes, v));
        uint8_t* quad = storage + to.v + (head * kv.page_size + to.row - to.row % 4) * kv.head_dim + to.row % 4;
        for (int64_t d = 0; d < kv.head_dim; d++) quad[d * 4] = static_cast<uint8_t>(codes[d]);
    }

  private:
    // Fills in the codes; returns the scale, a NaN where a value is not a finite number.
    PDS_INLINE float quantised(int8_t* codes, const T* x) const {
        const Scale scale(top_of(x, 0, kv.head_dim, kv.head_dim));
        if (std::isnan(scale.scale)) {
            std::memset(codes, 0, kv.head_dim);
            return std::numeric_limits<float>::quiet_NaN();  // always the same one
        }
        put_codes(codes, x, 0, kv.head_dim, kv.head_dim, scale.inverse);
        return scale.scale;
    }

    PDS_INLINE void put_scale(int64_t part, int64_t row, int64_t head, float scale) const {
        uint8_t* scales = storage + part + kv.codes();
        std::memcpy(scales + (head * kv.page_size + row) * sizeof scale, &scale, sizeof scale);
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

template <class P, class T>
int write_rows(const P& pages, const T* k, const T* v, const int32_t* slots, int64_t tokens) {
    const KVDesc& kv = pages.kv;
    if (!inside(kv, slots, tokens)) return kOutOfPool;
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

template <class P, class T>
int rope_write(const P& pages, T* q_out, const T* qkv, const float* cos, const float* sin, const int32_t* slots,
               int64_t tokens, int64_t num_heads, const T* q_norm, const T* k_norm, float eps) {
    const KVDesc& kv = pages.kv;
    if (!inside(kv, slots, tokens)) return kOutOfPool;
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

// body(pages, T()) for the rows' dtype and the pages' kind.
template <class Body> int on_pages(const KVDesc& kv, int64_t layer, int dtype, const Body& body) {
    if (kv.kind == kInt8Pages) {
        if (dtype == kFloat32) return body(Pages8<float>(kv, layer), float());
        return body(Pages8<bf16>(kv, layer), bf16());
    }
    if (dtype == kFloat32) return body(Pages<float>(kv, layer), float());
    return body(Pages<bf16>(kv, layer), bf16());
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
    return on_pages(*kv, layer, dtype, [&](const auto& pages, auto of) {
        using T = decltype(of);
        return write_rows(pages, static_cast<const T*>(k), static_cast<const T*>(v), slots, tokens);
    });
}

PDS_EXPORT int pds_rope_and_write_kv(void* q_out, const void* qkv, const float* cos, const float* sin, const KVDesc* kv,
                                     int64_t layer, const int32_t* slots, int64_t tokens, int64_t num_heads,
                                     const void* q_norm, const void* k_norm, float eps, int dtype) {
    return on_pages(*kv, layer, dtype, [&](const auto& pages, auto of) {
        using T = decltype(of);
        return rope_write(pages, static_cast<T*>(q_out), static_cast<const T*>(qkv), cos, sin, slots, tokens, num_heads,
                          static_cast<const T*>(q_norm), static_cast<const T*>(k_norm), eps);
    });
}
