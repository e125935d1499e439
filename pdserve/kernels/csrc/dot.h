// Sums of products of bytes: weights unsigned (codes plus an offset), activations signed. Also what is known of a
// quantised row. Sums of bytes are exact, so no result depends on their order; how sums become floats is linear-wise
// (int8.cpp, int4.cpp).
#pragma once

#include <algorithm>

#include "simd.h"

#ifdef PDS_AVX512
PDS_INLINE vi izero() { return _mm512_setzero_si512(); }
PDS_INLINE vi iand(vi a, vi b) { return _mm512_and_si512(a, b); }
PDS_INLINE vi isub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
PDS_INLINE vi imul(vi a, vi b) { return _mm512_mullo_epi32(a, b); }
PDS_INLINE vi ishift_down(vi a, int bits) { return _mm512_srli_epi32(a, bits); }
PDS_INLINE void istore(u32* p, vi a) { _mm512_storeu_si512(p, a); }
PDS_INLINE vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
PDS_INLINE vi to_int(vf a) { return _mm512_cvtps_epi32(a); }  // half to even
PDS_INLINE vf load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
PDS_INLINE void store_bytes(int8_t* p, vi a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a)); }
PDS_INLINE int32_t sum_lanes(vi a) { return _mm512_reduce_add_epi32(a); }
PDS_INLINE vi imax(vi a, vi b) { return _mm512_max_epi32(a, b); }
PDS_INLINE int32_t max_lanes(vi a) { return _mm512_reduce_max_epi32(a); }
#if defined(__AVX512VNNI__)
PDS_INLINE vi dot4(vi acc, vi weights, vi x) { return _mm512_dpbusd_epi32(acc, weights, x); }
#else
// By widening: pairs of 16 bits never saturate.
PDS_INLINE vi dot4(vi acc, vi weights, vi x) {
    const vi even = _mm512_madd_epi16(_mm512_and_si512(weights, _mm512_set1_epi16(255)),
                                      _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8));
    const vi odd = _mm512_madd_epi16(_mm512_srli_epi16(weights, 8), _mm512_srai_epi16(x, 8));
    return _mm512_add_epi32(acc, _mm512_add_epi32(even, odd));
}
#endif
#else
PDS_INLINE vi izero() { return _mm256_setzero_si256(); }
PDS_INLINE vi iand(vi a, vi b) { return _mm256_and_si256(a, b); }
PDS_INLINE vi isub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
PDS_INLINE vi imul(vi a, vi b) { return _mm256_mullo_epi32(a, b); }
PDS_INLINE vi ishift_down(vi a, int bits) { return _mm256_srli_epi32(a, bits); }
PDS_INLINE void istore(u32* p, vi a) { _mm256_storeu_si256((__m256i*)p, a); }
PDS_INLINE vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
PDS_INLINE vi to_int(vf a) { return _mm256_cvtps_epi32(a); }
PDS_INLINE vf load_half(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
PDS_INLINE void store_bytes(int8_t* p, vi a) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}
PDS_INLINE vi imax(vi a, vi b) { return _mm256_max_epi32(a, b); }
PDS_INLINE int32_t sum_lanes(vi a) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
PDS_INLINE int32_t max_lanes(vi a) {
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
#if defined(__AVXVNNI__)
PDS_INLINE vi dot4(vi acc, vi weights, vi x) { return _mm256_dpbusd_avx_epi32(acc, weights, x); }
#else
PDS_INLINE vi dot4(vi acc, vi weights, vi x) {
    const vi even = _mm256_madd_epi16(_mm256_and_si256(weights, _mm256_set1_epi16(255)),
                                      _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    const vi odd = _mm256_madd_epi16(_mm256_srli_epi16(weights, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
#endif
#endif

constexpr int kGroup = 32;  // inputs that share a scale where scales go by group

// Quantised rows: codes zero-padded to whole groups, row_bytes from one row to the next. One scale a row, or one for
// each group of kGroup inputs.
struct Rows8 {
    int8_t* codes;
    float* scales;    // [rows][groups], or [rows]
    int32_t* totals;  // sums of codes, [rows][groups] or [rows]
    float* sums;      // by group: scale times total
    long row_bytes, groups;
};

inline long groups_of(long num_in) { return (num_in + kGroup - 1) / kGroup; }

// Not a multiple of 4 KiB, the near cache's period; at least a cache line beyond the codes.
inline long row_bytes_of(long num_in) {
    const long bytes = (num_in + 63) / 64 * 64 + 64;
    return bytes % 4096 == 0 ? bytes + 64 : bytes;
}

// Carves rows out of a buffer of rows8_bytes(rows, num_in, by_group).
inline size_t rows8_bytes(long rows, long num_in, bool by_group) {
    const size_t scales = rows * (by_group ? groups_of(num_in) : 1) * sizeof(float);
    return rows * row_bytes_of(num_in) + 3 * scales + 128;
}
inline Rows8 carve_rows8(void* at, long rows, long num_in, bool by_group) {
    Rows8 r{};
    r.row_bytes = row_bytes_of(num_in);
    r.groups = by_group ? groups_of(num_in) : 1;
    r.codes = static_cast<int8_t*>(at);
    r.scales = reinterpret_cast<float*>(r.codes + rows * r.row_bytes);
    r.totals = reinterpret_cast<int32_t*>(r.scales + rows * r.groups);
    if (by_group) r.sums = reinterpret_cast<float*>(r.totals + rows * r.groups);
    return r;
}

// The scale that maps magnitudes up to `top` onto 127, and its inverse; both 0 where there is nothing but zeros.
struct Scale {
    float scale, inverse;

    explicit Scale(float top) : scale(top < 0x1p-100f ? 0.0f : top / 127.0f), inverse(top < 0x1p-100f ? 0.0f : 127.0f / top) {}
};

template <class T> PDS_INLINE vf load_or_zero(const T* x, long at, long cols) {
    if (at + VW <= cols) return load_as_float(x + at);
    return at < cols ? load_as_float(x + at, first(static_cast<int>(cols - at))) : vzero();
}

// A magnitude's bits: as integers they are in the order of the magnitudes, infinities and then NaNs above all numbers.
PDS_INLINE vi magnitude_bits(vf x) { return iand(as_int(x), iset(0x7fffffffu)); }

// The greatest magnitude; a NaN where there is a value that is not a finite number.
PDS_INLINE float top_of(vi bits) {
    const int32_t top = max_lanes(bits);
    if (top >= 0x7f800000) return NAN;
    float x;
    std::memcpy(&x, &top, sizeof(x));
    return x;
}

template <class T> PDS_INLINE float top_of(const T* x, long from, long to, long cols) {
    vi top = izero();
    long i = from;
    for (; i + VW <= std::min(to, cols); i += VW) top = imax(top, magnitude_bits(load_as_float(x + i)));
    for (; i < to; i += VW) top = imax(top, magnitude_bits(load_or_zero(x, i, cols)));
    return top_of(top);
}

// Codes [from, to) of a row; returns their sum. `to` may lie beyond the inputs: zeros.
template <class T> PDS_INLINE int32_t put_codes(int8_t* codes, const T* x, long from, long to, long cols, float inverse) {
    vi total = izero();
    const auto put = [&](long i, vf v) {
        const vi code = to_int(vmul(v, vset(inverse)));
        total = iadd(total, code);
        store_bytes(codes + i, code);
    };
    long i = from;
    for (; i + VW <= std::min(to, cols); i += VW) put(i, load_as_float(x + i));
    for (; i < to; i += VW) put(i, load_or_zero(x, i, cols));
    return sum_lanes(total);
}

// Scales and codes of kGroup inputs; WHOLE: none of them lies beyond the last.
template <bool WHOLE, class T> PDS_INLINE void quantise_group(const Rows8& to, int8_t* codes, long at, const T* x, long from, long cols) {
    constexpr int N = kGroup / VW;
    vf v[N];
    vi top = izero(), total = izero();
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
        v[i] = WHOLE ? load_as_float(x + from + i * VW) : load_or_zero(x, from + i * VW, cols);
        top = imax(top, magnitude_bits(v[i]));
    }
    const Scale scale(top_of(top));
#pragma GCC unroll 4
    for (int i = 0; i < N; i++) {
        const vi code = to_int(vmul(v[i], vset(scale.inverse)));
        total = iadd(total, code);
        store_bytes(codes + from + i * VW, code);
    }
    to.scales[at] = scale.scale;
    to.totals[at] = sum_lanes(total);
    to.sums[at] = scale.scale * static_cast<float>(to.totals[at]);
}

template <class T> PDS_INLINE void quantise_row(const Rows8& to, long row, const T* x, long cols, bool by_group) {
    int8_t* codes = to.codes + row * to.row_bytes;
    if (!by_group) {
        const long padded = groups_of(cols) * kGroup;
        const Scale scale(top_of(x, 0, padded, cols));
        to.scales[row] = scale.scale;
        to.totals[row] = put_codes(codes, x, 0, padded, cols, scale.inverse);
        return;
    }
    for (long g = 0; g < to.groups; g++) {
        const long at = row * to.groups + g;
        if ((g + 1) * kGroup <= cols) quantise_group<true>(to, codes, at, x, g * kGroup, cols);
        else quantise_group<false>(to, codes, at, x, g * kGroup, cols);
    }
}
