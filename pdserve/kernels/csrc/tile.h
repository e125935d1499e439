// The one micro-kernel: MR rows times NB*NVB vectors, reduced over steps in order. Products of layers,
// q k^T and p v are all calls of it, so every result is one chain of multiply-adds whatever the tile's shape.
#pragma once

#include <algorithm>
#include <type_traits>

#include "simd.h"

// A step of the right side is 4 bytes per lane: one float, or a pair of bfloat16. The left side, one word per
// broadcast, is a pair too where the CPU has a fast pair product (PDS_DOT_BF16), else one float per element:
// Intel's VDPBF16PS runs at an eighth of the rate of two fused multiply-adds.
template <class T> constexpr int kElemsPerStep = sizeof(u32) / sizeof(T);
#ifdef PDS_DOT_BF16
template <class T> using Left = T;
#else
template <class T> using Left = float;
#endif
template <class T> constexpr int kElemsPerWord = sizeof(u32) / sizeof(Left<T>);
template <class T> constexpr int kWordsPerStep = kElemsPerStep<T> / kElemsPerWord<T>;

template <class T> constexpr bool kWidens = kWordsPerStep<T> == 2;

// The part of a right-hand vector that word `word` of a step is multiplied with.
template <class T> PDS_INLINE vi part(vi pair, int word) {
    if constexpr (kWidens<T>) return word == 0 ? shift_up(pair) : high_half(pair);
    return pair;
}

template <class T> PDS_INLINE vf mac(vf acc, vi a, vi b) {
#ifdef PDS_DOT_BF16
    if constexpr (std::is_same_v<T, bf16>) return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#endif
    return fma(as_float(a), as_float(b), acc);
}

// Word w of row r of A lies at a[r * AROW + w * AWORD]. B comes as NB bases of NVB vectors side by side, b_step
// apart per step. TAIL: the last vector is loaded under a mask. AHEAD: words by which B is called up, for rows too
// few to hide memory.
template <class T, int MR, int NB, int NVB, long AROW, long AWORD, bool TAIL = false, long AHEAD = 0>
PDS_INLINE void tile(vf (&acc)[MR][NB * NVB], const u32* a, const u32* const* bases, long b_step, long steps,
                     Mask mask = Mask()) {
    const u32* b[NB];
    for (int i = 0; i < NB; i++) b[i] = bases[i];
    for (long s = 0; s < steps; s++, a += kWordsPerStep<T> * AWORD) {
        vi column[NB * NVB][kWordsPerStep<T>];
#pragma GCC unroll 16
        for (int v = 0; v < NB * NVB; v++) {
            const u32* p = b[v / NVB] + (v % NVB) * VW;
            if constexpr (AHEAD > 0) _mm_prefetch(reinterpret_cast<const char*>(p + AHEAD), _MM_HINT_T0);
            const vi pair = TAIL && v == NB * NVB - 1 ? iload(p, mask) : iload(p);
#pragma GCC unroll 16
            for (int w = 0; w < kWordsPerStep<T>; w++) column[v][w] = part<T>(pair, w);
        }
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
#pragma GCC unroll 16
            for (int w = 0; w < kWordsPerStep<T>; w++) {
                const vi word = iset(a[r * AROW + w * AWORD]);
#pragma GCC unroll 16
                for (int v = 0; v < NB * NVB; v++) acc[r][v] = mac<T>(acc[r][v], word, column[v][w]);
            }
        }
#pragma GCC unroll 16
        for (int i = 0; i < NB; i++) b[i] += b_step;
    }
}

// Copies a row into words of the left side; the last word is filled up with a zero.
template <class T> PDS_INLINE void load_words(u32* to, const T* from, long elems) {
    auto* left = reinterpret_cast<Left<T>*>(to);
    long i = 0;
    if constexpr (std::is_same_v<T, Left<T>>) {
        std::memcpy(left, from, sizeof(T) * elems);
        i = elems;
    } else {
        for (; i + VW <= elems; i += VW) vstore(left + i, load_as_float(from + i));
        if (i < elems) vstore(left + i, load_as_float(from + i, first(static_cast<int>(elems - i))),
                              first(static_cast<int>(elems - i)));
        i = elems;
    }
    for (; i % kElemsPerStep<T>; i++) left[i] = Left<T>{};
}
