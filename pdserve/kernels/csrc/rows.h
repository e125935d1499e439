// One row of RMS norm, of a sum and its norm, and of the gated activation: each reduced in a fixed order.
#pragma once

#include "simd.h"

template <class T> void norm_row(T* out, const T* x, const T* weight, int64_t cols, float eps) {
    vf squares = vzero();
    for_vectors(cols, [&](int64_t i, auto m) {
        const vf v = load_as_float(x + i, m);
        squares = fma(v, v, squares);
    });
    const vf scale = vset(1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(cols) + eps));
    for_vectors(cols, [&](int64_t i, auto m) {
        const vf normed = rounded<T>(vmul(load_as_float(x + i, m), scale));
        store_rounded(out + i, vmul(normed, load_as_float(weight + i, m)), m);
    });
}

template <class T>
void add_norm_row(T* out, T* total, const T* x, const T* residual, const T* weight, int64_t cols, float eps) {
    for_vectors(cols, [&](int64_t i, auto m) {
        store_rounded(total + i, vadd(load_as_float(x + i, m), load_as_float(residual + i, m)), m);
    });
    norm_row(out, total, weight, cols, eps);
}

// gate, then up, cols each.
template <class T> void silu_mul_row(T* out, const T* gate, int64_t cols) {
    for_vectors(cols, [&](int64_t i, auto m) {
        const vf g = load_as_float(gate + i, m);
        const vf silu = vdiv(g, vadd(vset(1.0f), vexp(vsub(vzero(), g))));
        store_rounded(out + i, vmul(silu, load_as_float(gate + cols + i, m)), m);
    });
}
