// Vectors of the build's ISA: 16 floats with AVX-512, 8 with AVX2. Everything above is written for VW lanes.
#pragma once

#include <cmath>
#include <cstring>
#include <immintrin.h>

#include "common.h"

#define PDS_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PDS_AVX512 1
#elif !defined(__AVX2__) || !defined(__FMA__)
#error "the kernels need AVX2 and FMA"
#endif

using u32 = uint32_t;

#ifdef PDS_AVX512
constexpr int VW = 16;
using vf = __m512;
using vi = __m512i;
using Mask = __mmask16;

PDS_INLINE vf vzero() { return _mm512_setzero_ps(); }
PDS_INLINE vf vset(float x) { return _mm512_set1_ps(x); }
PDS_INLINE vi iset(u32 x) { return _mm512_set1_epi32(static_cast<int>(x)); }
PDS_INLINE vf vload(const float* p) { return _mm512_loadu_ps(p); }
PDS_INLINE void vstore(float* p, vf x) { _mm512_storeu_ps(p, x); }
PDS_INLINE vi iload(const u32* p) { return _mm512_loadu_si512(p); }
PDS_INLINE Mask first(int n) { return static_cast<Mask>((1u << n) - 1); }
PDS_INLINE vi iload(const u32* p, Mask m) { return _mm512_maskz_loadu_epi32(m, p); }
PDS_INLINE vf vload(const float* p, Mask m) { return _mm512_maskz_loadu_ps(m, p); }
PDS_INLINE void vstore(float* p, vf x, Mask m) { _mm512_mask_storeu_ps(p, m, x); }
PDS_INLINE vf as_float(vi x) { return _mm512_castsi512_ps(x); }
PDS_INLINE vi as_int(vf x) { return _mm512_castps_si512(x); }
PDS_INLINE vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
PDS_INLINE vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
PDS_INLINE vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
PDS_INLINE vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
PDS_INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
PDS_INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
PDS_INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
PDS_INLINE float first_lane(vf x) { return _mm512_cvtss_f32(x); }
PDS_INLINE float max_lanes(vf x) { return _mm512_reduce_max_ps(x); }
PDS_INLINE vi iadd(vi a, vi b) { return _mm512_add_epi32(a, b); }
PDS_INLINE vi to_exponent(vi x) { return _mm512_slli_epi32(x, 23); }
PDS_INLINE vi shift_up(vi x) { return _mm512_slli_epi32(x, 16); }
PDS_INLINE vi high_half(vi x) { return _mm512_maskz_mov_epi16(0xaaaaaaaau, x); }
// x where low <= lane + base < high, else other.
PDS_INLINE vf within(vf x, vf other, int base, int low, int high) {
    const vi lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const Mask above = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(low - base));
    const Mask both = _mm512_mask_cmplt_epi32_mask(above, lane, _mm512_set1_epi32(high - base));
    return _mm512_mask_blend_ps(both, other, x);
}
PDS_INLINE vf load_bf16(const bf16* p) {
    return as_float(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
PDS_INLINE vf load_bf16(const bf16* p, Mask m) {
    return as_float(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16));
}
// Round to nearest even; a NaN stays one.
PDS_INLINE __m256i round_bf16(vf x) {
    const vi bits = as_int(x);
    const vi odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const vi sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const Mask nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(sum, nan, _mm512_set1_epi32(0x7fc00000)), 16));
}
PDS_INLINE void store_bf16(bf16* p, vf x) { _mm256_storeu_si256((__m256i*)p, round_bf16(x)); }
PDS_INLINE void store_bf16(bf16* p, vf x, Mask m) { _mm256_mask_storeu_epi16(p, m, round_bf16(x)); }

#else  // AVX2
constexpr int VW = 8;
using vf = __m256;
using vi = __m256i;
using Mask = __m256i;

PDS_INLINE vf vzero() { return _mm256_setzero_ps(); }
PDS_INLINE vf vset(float x) { return _mm256_set1_ps(x); }
PDS_INLINE vi iset(u32 x) { return _mm256_set1_epi32(static_cast<int>(x)); }
PDS_INLINE vf vload(const float* p) { return _mm256_loadu_ps(p); }
PDS_INLINE void vstore(float* p, vf x) { _mm256_storeu_ps(p, x); }
PDS_INLINE vi iload(const u32* p) { return _mm256_loadu_si256((const __m256i*)p); }
PDS_INLINE Mask first(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
PDS_INLINE vi iload(const u32* p, Mask m) { return _mm256_maskload_epi32((const int*)p, m); }
PDS_INLINE vf vload(const float* p, Mask m) { return _mm256_maskload_ps(p, m); }
PDS_INLINE void vstore(float* p, vf x, Mask m) { _mm256_maskstore_ps(p, m, x); }
PDS_INLINE vf as_float(vi x) { return _mm256_castsi256_ps(x); }
PDS_INLINE vi as_int(vf x) { return _mm256_castps_si256(x); }
PDS_INLINE vf vadd(vf a, vf b) { return _mm256_add_ps(a, b); }
PDS_INLINE vf vsub(vf a, vf b) { return _mm256_sub_ps(a, b); }
PDS_INLINE vf vmul(vf a, vf b) { return _mm256_mul_ps(a, b); }
PDS_INLINE vf vdiv(vf a, vf b) { return _mm256_div_ps(a, b); }
PDS_INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
PDS_INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
PDS_INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
PDS_INLINE float first_lane(vf x) { return _mm256_cvtss_f32(x); }
PDS_INLINE float max_lanes(vf x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
PDS_INLINE vi iadd(vi a, vi b) { return _mm256_add_epi32(a, b); }
PDS_INLINE vi to_exponent(vi x) { return _mm256_slli_epi32(x, 23); }
PDS_INLINE vi shift_up(vi x) { return _mm256_slli_epi32(x, 16); }
PDS_INLINE vi high_half(vi x) { return _mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u))); }
PDS_INLINE vf within(vf x, vf other, int base, int low, int high) {
    const vi lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const vi above = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(low - base - 1));
    const vi below = _mm256_cmpgt_epi32(_mm256_set1_epi32(high - base), lane);
    return _mm256_blendv_ps(other, x, as_float(_mm256_and_si256(above, below)));
}
PDS_INLINE vf load_bf16(const bf16* p) {
    return as_float(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
PDS_INLINE vf load_bf16(const bf16* p, Mask m) {
    bf16 lanes[VW] = {};
    std::memcpy(lanes, p, sizeof(bf16) * __builtin_popcount(_mm256_movemask_ps(as_float(m))));
    return load_bf16(lanes);
}
PDS_INLINE __m128i round_bf16(vf x) {
    const vi bits = as_int(x);
    const vi odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const vi sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const vf nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    const vi kept = as_int(_mm256_blendv_ps(as_float(sum), as_float(_mm256_set1_epi32(0x7fc00000)), nan));
    const vi high = _mm256_srli_epi32(kept, 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}
PDS_INLINE void store_bf16(bf16* p, vf x) { _mm_storeu_si128((__m128i*)p, round_bf16(x)); }
PDS_INLINE void store_bf16(bf16* p, vf x, Mask m) {
    bf16 lanes[VW];
    store_bf16(lanes, x);
    std::memcpy(p, lanes, sizeof(bf16) * __builtin_popcount(_mm256_movemask_ps(as_float(m))));
}
#endif

PDS_INLINE vf load_as_float(const float* p) { return vload(p); }
PDS_INLINE vf load_as_float(const bf16* p) { return load_bf16(p); }
PDS_INLINE vf load_as_float(const float* p, Mask m) { return vload(p, m); }
PDS_INLINE vf load_as_float(const bf16* p, Mask m) { return load_bf16(p, m); }
PDS_INLINE void store_rounded(float* p, vf x) { vstore(p, x); }
PDS_INLINE void store_rounded(bf16* p, vf x) { store_bf16(p, x); }
PDS_INLINE void store_rounded(float* p, vf x, Mask m) { vstore(p, x, m); }
PDS_INLINE void store_rounded(bf16* p, vf x, Mask m) { store_bf16(p, x, m); }

// All lanes, where code serves whole and masked vectors alike.
struct Whole {};
template <class T> PDS_INLINE vf load_as_float(const T* p, Whole) { return load_as_float(p); }
template <class T> PDS_INLINE void store_rounded(T* p, vf x, Whole) { store_rounded(p, x); }

// Calls body(first column, lanes) for every vector of a row; lanes is Whole, or the Mask of the last one.
template <class Body> PDS_INLINE void for_vectors(int64_t cols, Body body) {
    int64_t i = 0;
    for (; i + VW <= cols; i += VW) body(i, Whole());
    if (i < cols) body(i, first(static_cast<int>(cols - i)));
}

// x rounded to T and back.
template <class T> PDS_INLINE vf rounded(vf x) {
    T lanes[VW];
    store_rounded(lanes, x);
    return load_as_float(lanes);
}
template <> PDS_INLINE vf rounded<float>(vf x) { return x; }

// Sum of the lanes, halving in a fixed order.
PDS_INLINE float sum_lanes(vf x) {
    float lane[VW];
    vstore(lane, x);
    for (int width = VW / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

// 2^r for r in [-1/2, 1/2], relative error 2e-9 before rounding (minimax), times 2^n with n in the low bits of
// `magic`, which is n + 1.5 * 2^23.
PDS_INLINE vf scaled_power(vf r, vf magic) {
    vf p = vset(1.53458124e-4f);
    p = fma(p, r, vset(1.33999309e-3f));
    p = fma(p, r, vset(9.61848907e-3f));
    p = fma(p, r, vset(5.55032864e-2f));
    p = fma(p, r, vset(2.40226462e-1f));
    p = fma(p, r, vset(6.93147182e-1f));
    p = fma(p, r, vset(1.0f));
    return as_float(iadd(as_int(p), to_exponent(as_int(magic))));
}

constexpr float kMagic = 12582912.0f;

// 2^x for x up to 127; at least 2^-126.
PDS_INLINE vf vexp2(vf x) {
    const vf y = vmax(x, vset(-126.0f));
    const vf magic = vadd(y, vset(kMagic));
    return scaled_power(vsub(y, vsub(magic, vset(kMagic))), magic);
}

// e^x within [e^-87, e^88]: reduced by ln 2 in two parts (Cody and Waite), so exact to about an ulp everywhere.
PDS_INLINE vf vexp(vf x) {
    const vf y = vmin(vmax(x, vset(-87.0f)), vset(88.0f));
    const vf magic = vadd(vmul(y, vset(1.44269504f)), vset(kMagic));
    const vf n = vsub(magic, vset(kMagic));
    const vf r = fma(n, vset(2.12194440e-4f), fma(n, vset(-0.693359375f), y));
    return scaled_power(vmul(r, vset(1.44269504f)), magic);
}
