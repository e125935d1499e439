// XXH3, 128 bits, seed 0, for inputs longer than 240 bytes (xxHash specification, "XXH3 algorithm overview"):
// eight 64-bit lanes over stripes of 64 bytes, scrambled after each block of 16 stripes. Only the lanes are vectors;
// whoever drives them may store each stripe on the way, which makes copy and digest one pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace xxh3 {

constexpr size_t STRIPE = 64;
constexpr size_t BLOCK = 1024;
constexpr size_t SECRET_BYTES = 192;

constexpr uint64_t PRIME32_1 = 0x9E3779B1u, PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;
constexpr uint64_t PRIME64_1 = 0x9E3779B185EBCA87u, PRIME64_2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t PRIME64_3 = 0x165667B19E3779F9u, PRIME64_4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t PRIME64_5 = 0x27D4EB2F165667C5u, PRIME_MIX = 0x165667919E3779F9u;

// The specification's default secret.
alignas(64) constexpr uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

#if defined(__AVX512F__)

// Eight 64-bit lanes in one register.
struct Lanes {
    __m512i v;

    static Lanes load(const void* from) { return {_mm512_loadu_si512(from)}; }
    void store(void* to) const { _mm512_storeu_si512(to, v); }
    void stream(void* to) const { _mm512_stream_si512(static_cast<__m512i*>(to), v); }

    void accumulate(Lanes data, const uint8_t* secret) {
        const __m512i key = _mm512_xor_si512(data.v, _mm512_loadu_si512(secret));
        const __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
        const __m512i swapped = _mm512_shuffle_epi32(data.v, static_cast<_MM_PERM_ENUM>(0x4E));
        v = _mm512_add_epi64(v, _mm512_add_epi64(product, swapped));
    }

    void scramble(const uint8_t* secret) {
        const __m512i prime = _mm512_set1_epi64(PRIME32_1);
        __m512i x = _mm512_xor_si512(v, _mm512_srli_epi64(v, 47));
        x = _mm512_xor_si512(x, _mm512_loadu_si512(secret));
        const __m512i high = _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(x, 32), prime), 32);
        v = _mm512_add_epi64(_mm512_mul_epu32(x, prime), high);
    }
};

#else

// The same in two registers.
struct Lanes {
    __m256i v[2];

    static Lanes load(const void* from) {
        const auto* at = static_cast<const __m256i*>(from);
        return {{_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)}};
    }
    void store(void* to) const {
        for (int half = 0; half < 2; half++) _mm256_storeu_si256(static_cast<__m256i*>(to) + half, v[half]);
    }
    void stream(void* to) const {
        for (int half = 0; half < 2; half++) _mm256_stream_si256(static_cast<__m256i*>(to) + half, v[half]);
    }

    void accumulate(Lanes data, const uint8_t* secret) {
        const Lanes with = load(secret);
        for (int half = 0; half < 2; half++) {
            const __m256i key = _mm256_xor_si256(data.v[half], with.v[half]);
            const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
            const __m256i swapped = _mm256_shuffle_epi32(data.v[half], 0x4E);
            v[half] = _mm256_add_epi64(v[half], _mm256_add_epi64(product, swapped));
        }
    }

    void scramble(const uint8_t* secret) {
        const Lanes with = load(secret);
        const __m256i prime = _mm256_set1_epi64x(PRIME32_1);
        for (int half = 0; half < 2; half++) {
            __m256i x = _mm256_xor_si256(v[half], _mm256_srli_epi64(v[half], 47));
            x = _mm256_xor_si256(x, with.v[half]);
            const __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime), 32);
            v[half] = _mm256_add_epi64(_mm256_mul_epu32(x, prime), high);
        }
    }
};

#endif

inline Lanes start() {
    const uint64_t first[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                               PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    return Lanes::load(first);
}

inline void block(Lanes& lanes, const uint8_t* data) {
    for (size_t n = 0; n < BLOCK / STRIPE; n++) lanes.accumulate(Lanes::load(data + n * STRIPE), SECRET + 8 * n);
    lanes.scramble(SECRET + SECRET_BYTES - STRIPE);
}

inline uint64_t word(const uint8_t* at) {
    uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

inline uint64_t merge(const uint64_t* lanes, const uint8_t* secret, uint64_t value) {
    for (int pair = 0; pair < 4; pair++) {
        const uint64_t left = lanes[2 * pair] ^ word(secret + 16 * pair);
        const uint64_t right = lanes[2 * pair + 1] ^ word(secret + 16 * pair + 8);
        const unsigned __int128 product = static_cast<unsigned __int128>(left) * right;
        value += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
    }
    value = (value ^ (value >> 37)) * PRIME_MIX;
    return value ^ (value >> 32);
}

// rest: what follows the last whole block, 1 to 1,024 bytes; last: the input's last 64 bytes; total: bytes in all.
// out: 16 bytes, the canonical (big-endian) form.
inline void finish(Lanes lanes, const uint8_t* rest, size_t rest_bytes, const uint8_t* last, uint64_t total,
                   uint8_t* out) {
    for (size_t n = 0; n < (rest_bytes - 1) / STRIPE; n++)
        lanes.accumulate(Lanes::load(rest + n * STRIPE), SECRET + 8 * n);
    lanes.accumulate(Lanes::load(last), SECRET + SECRET_BYTES - STRIPE - 7);
    uint64_t words[8];
    lanes.store(words);
    const uint64_t low = merge(words, SECRET + 11, total * PRIME64_1);
    const uint64_t high = merge(words, SECRET + SECRET_BYTES - STRIPE - 11, ~(total * PRIME64_2));
    const uint64_t big[2] = {__builtin_bswap64(high), __builtin_bswap64(low)};
    std::memcpy(out, big, sizeof big);
}

}  // namespace xxh3
