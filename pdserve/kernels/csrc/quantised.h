// What the quantised linear layers share with their callers: the descriptor, how a result is stored, the entry points.
#pragma once

#include "dot.h"

// kInt8Grouped: rows scaled by group (int8_grouped.cpp).
enum QuantKind : int { kInt8 = 8, kInt8Grouped = 9, kInt4 = 4 };

// A quantised linear layer. See int8.cpp and int4.cpp for the weights' order; Python has the same fields (native form).
struct QuantLinear {
    const void* weight;
    const float* scales;     // int8: of an output; int4: a power of two that all of an output's scales are times
    const int32_t* offsets;  // int8: what codes were moved by
    const float* bias;       // or null
    int64_t kind, num_out, num_in, group_blocks;  // group_blocks: int4, groups of kGroup inputs that share scales
};

// Writes VW results of a row from column `col` on, cut off at num_out, rounded to the dtype.
PDS_INLINE void store_result(void* out, int dtype, const float* bias, long row, long col, long num_out, vf x) {
    const bool whole = col + VW <= num_out;
    const Mask mask = first(whole ? VW : static_cast<int>(num_out - col));
    if (bias != nullptr) x = vadd(x, vload(bias + col, mask));
    const long at = row * num_out + col;
    if (dtype == kFloat32) vstore(static_cast<float*>(out) + at, x, mask);
    else if (whole) store_bf16(static_cast<bf16*>(out) + at, x);
    else store_bf16(static_cast<bf16*>(out) + at, x, mask);
}

// Writes value(row of the block, vector) for MR rows and COLS vectors; in one sweep where nothing is cut off or added.
template <class T, int MR, int COLS, class Value>
PDS_INLINE void store_whole(T* to, long num_out, const Value& value) {
    for (int v = 0; v < COLS; v++)
        for (int r = 0; r < MR; r++) store_rounded(to + r * num_out + v * VW, value(r, v));
}
template <int MR, int COLS, class Value>
PDS_INLINE void store_block(void* out, int dtype, const float* bias, long row, long from, long num_out, const Value& value) {
    const long at = row * num_out + from;
    if (bias == nullptr && from + COLS * VW <= num_out) {
        if (dtype == kFloat32) store_whole<float, MR, COLS>(static_cast<float*>(out) + at, num_out, value);
        else store_whole<bf16, MR, COLS>(static_cast<bf16*>(out) + at, num_out, value);
        return;
    }
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < COLS && from + v * VW < num_out; v++)
            store_result(out, dtype, bias, row + r, from + v * VW, num_out, value(r, v));
}

int64_t int8_panel_width();
void int8_linear(const QuantLinear& linear, const Rows8& rows, int64_t num_rows, void* out, int out_dtype);
void int8_grouped_linear(const QuantLinear& linear, const Rows8& rows, int64_t num_rows, void* out, int out_dtype);
void int4_linear(const QuantLinear& linear, const Rows8& rows, int64_t num_rows, void* out, int out_dtype);

inline bool by_group(const QuantLinear& linear) { return linear.kind != kInt8; }

inline void quant_linear(const QuantLinear& linear, const Rows8& rows, int64_t num_rows, void* out, int out_dtype) {
    if (linear.kind == kInt4) int4_linear(linear, rows, num_rows, out, out_dtype);
    else if (linear.kind == kInt8Grouped) int8_grouped_linear(linear, rows, num_rows, out, out_dtype);
    else int8_linear(linear, rows, num_rows, out, out_dtype);
}
