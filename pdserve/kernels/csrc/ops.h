// Exported operators that other sources call.
#pragma once

#include "common.h"

extern "C" {
void pds_linear(void* out, const void* x, const void* weight, const float* bias, int64_t rows, int64_t num_out,
                int64_t num_in, int dtype, int out_float);
int pds_rope_and_write_kv(void* q_out, const void* qkv, const float* cos, const float* sin, const KVDesc* kv,
                          int64_t layer, const int32_t* slots, int64_t tokens, int64_t num_heads, const void* q_norm,
                          const void* k_norm, float eps, int dtype);
int pds_paged_attention(void* out, const void* q, const KVDesc* kv, int64_t layer, const AttentionDesc* meta,
                        int64_t num_heads, float scale, int64_t window, int dtype);
}
