// The one micro-kernel: MR rows times NB*NVB vectors, reduced over steps in order. Products of layers,
// q k^T and p v are all calls of it, so every result is one chain of multiply-adds whatever the tile's shape.
#pragma once

#include "simd.h"

// A step is 4 bytes per lane: one float, or a pair of bfloat16.
template <class T> PDS_INLINE vf mac(vf acc, vi a, vi b);

template <> PDS_INLINE vf mac<float>(vf acc, vi a, vi b) { return fma(as_float(a), as_float(b), acc); }

template <> PDS_INLINE vf mac<bf16>(vf acc, vi a, vi b) {
#ifdef PDS_BF16
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
    acc = fma(as_float(shift_up(a)), as_float(shift_up(b)), acc);
    return fma(as_float(high_half(a)), as_float(high_half(b)), acc);
#endif
}

template <class T> constexpr int kElemsPerStep = sizeof(u32) / sizeof(T);

// Element (row r, step s) of A lies at a[r * AROW + s * ASTEP]. B comes as NB bases of NVB vectors side by side,
// b_step apart per step. TAIL: the last vector is loaded under a mask.
template <class T, int MR, int NB, int NVB, long AROW, long ASTEP, bool TAIL = false>
PDS_INLINE void tile(vf (&acc)[MR][NB * NVB], const u32* a, const u32* const* bases, long b_step, long steps,
                     Mask mask = Mask()) {
    const u32* b[NB];
    for (int i = 0; i < NB; i++) b[i] = bases[i];
    for (long s = 0; s < steps; s++) {
        vi column[NB * NVB];
#pragma GCC unroll 16
        for (int v = 0; v < NB * NVB; v++) {
            const u32* p = b[v / NVB] + (v % NVB) * VW;
            column[v] = TAIL && v == NB * NVB - 1 ? iload(p, mask) : iload(p);
        }
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
            const vi row = iset(a[r * AROW + s * ASTEP]);
#pragma GCC unroll 16
            for (int v = 0; v < NB * NVB; v++) acc[r][v] = mac<T>(acc[r][v], row, column[v]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < NB; i++) b[i] += b_step;
    }
}
