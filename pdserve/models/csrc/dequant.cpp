// GGUF's plain block types to float32 or bfloat16: one pass, one thread, each operation rounded once as written.
//
// A block is 32 numbers: half d (and half m), then for the types of five bits a word of fifth bits, then 16 bytes
// of low halves (numbers 0 to 15) and high halves (16 to 31), or 32 int8. The formulas are ggml's.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define PDG_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kBlock = 32, kHalf = 16;

template <class T> T read(const uint8_t* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

float half(const uint8_t* at) { return _cvtsh_ss(read<uint16_t>(at)); }

void halves(int32_t* q, const uint8_t* packed) {
    for (int i = 0; i < kHalf; i++) {
        q[i] = packed[i] & 15;
        q[i + kHalf] = packed[i] >> 4;
    }
}

void fifth(int32_t* q, const uint8_t* word) {
    const uint32_t bits = read<uint32_t>(word);
    for (int i = 0; i < kBlock; i++) q[i] |= static_cast<int32_t>((bits >> i & 1) << 4);
}

// Each type: its bytes, and a block's numbers.
struct Q4_0 {
    static constexpr long bytes = 18;
    static void values(float* out, const uint8_t* b) {
        int32_t q[kBlock];
        halves(q, b + 2);
        const float d = half(b);
        for (int i = 0; i < kBlock; i++) out[i] = d * static_cast<float>(q[i] - 8);
    }
};

struct Q4_1 {
    static constexpr long bytes = 20;
    static void values(float* out, const uint8_t* b) {
        int32_t q[kBlock];
        halves(q, b + 4);
        const float d = half(b), m = half(b + 2);
        for (int i = 0; i < kBlock; i++) out[i] = static_cast<float>(q[i]) * d + m;
    }
};

struct Q5_0 {
    static constexpr long bytes = 22;
    static void values(float* out, const uint8_t* b) {
        int32_t q[kBlock];
        halves(q, b + 6);
        fifth(q, b + 2);
        const float d = half(b);
        for (int i = 0; i < kBlock; i++) out[i] = d * static_cast<float>(q[i] - 16);
    }
};

struct Q5_1 {
    static constexpr long bytes = 24;
    static void values(float* out, const uint8_t* b) {
        int32_t q[kBlock];
        halves(q, b + 8);
        fifth(q, b + 4);
        const float d = half(b), m = half(b + 2);
        for (int i = 0; i < kBlock; i++) out[i] = d * static_cast<float>(q[i]) + m;
    }
};

struct Q8_0 {
    static constexpr long bytes = 34;
    static void values(float* out, const uint8_t* b) {
        int8_t q[kBlock];
        std::memcpy(q, b + 2, sizeof q);
        const float d = half(b);
        for (int i = 0; i < kBlock; i++) out[i] = static_cast<float>(q[i]) * d;
    }
};

void store(float* out, const float* values) { std::memcpy(out, values, kBlock * sizeof(float)); }

void store(uint16_t* out, const float* values) {  // bfloat16: to nearest, ties to even; any NaN is 0x7FC0
    for (int i = 0; i < kBlock; i++) {
        uint32_t bits;
        std::memcpy(&bits, values + i, sizeof bits);
        const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
        out[i] = static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
    }
}

template <class Type, class T> void all(T* out, const uint8_t* raw, long blocks) {
    for (long n = 0; n < blocks; n++) {
        float values[kBlock];
        Type::values(values, raw + n * Type::bytes);
        store(out + n * kBlock, values);
    }
}

template <class T> int chosen(T* out, const uint8_t* raw, long blocks, int kind) {
    switch (kind) {  // GGML's numbers
        case 2: return all<Q4_0>(out, raw, blocks), 1;
        case 3: return all<Q4_1>(out, raw, blocks), 1;
        case 6: return all<Q5_0>(out, raw, blocks), 1;
        case 7: return all<Q5_1>(out, raw, blocks), 1;
        case 8: return all<Q8_0>(out, raw, blocks), 1;
        default: return 0;
    }
}

}  // namespace

// out: float, or bfloat16 if is_short. False: no such type.
PDG_EXPORT int pdg_dequantise(void* out, const uint8_t* raw, long blocks, int kind, int is_short) {
    return is_short ? chosen(static_cast<uint16_t*>(out), raw, blocks, kind)
                    : chosen(static_cast<float*>(out), raw, blocks, kind);
}
