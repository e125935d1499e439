// RMS norm and the gated activation: rows are independent, each reduced in a fixed order.
#include "parallel.h"
#include "rows.h"

namespace {

constexpr int64_t kWorth = 1 << 15;

template <class T> void norm(T* out, const T* x, const T* weight, int64_t rows, int64_t cols, float eps) {
    parallel_for_runs(rows, threads_for(rows * cols, kWorth),
                      [&](int64_t r) { norm_row(out + r * cols, x + r * cols, weight, cols, eps); });
}

template <class T>
void add_norm(T* out, T* total, const T* x, const T* residual, const T* weight, int64_t rows, int64_t cols, float eps) {
    parallel_for_runs(rows, threads_for(rows * cols, kWorth), [&](int64_t r) {
        const int64_t at = r * cols;
        add_norm_row(out + at, total + at, x + at, residual + at, weight, cols, eps);
    });
}

template <class T> void silu_mul(T* out, const T* gate_up, int64_t rows, int64_t cols) {
    parallel_for_runs(rows, threads_for(rows * cols, kWorth),
                      [&](int64_t r) { silu_mul_row(out + r * cols, gate_up + r * 2 * cols, cols); });
}

}  // namespace

PDS_EXPORT void pds_rms_norm(void* out, const void* x, const void* weight, int64_t rows, int64_t cols, float eps,
                             int dtype) {
    if (dtype == kFloat32) norm((float*)out, (const float*)x, (const float*)weight, rows, cols, eps);
    else norm((bf16*)out, (const bf16*)x, (const bf16*)weight, rows, cols, eps);
}

PDS_EXPORT void pds_add_rms_norm(void* out, void* total, const void* x, const void* residual, const void* weight,
                                 int64_t rows, int64_t cols, float eps, int dtype) {
    if (dtype == kFloat32)
        add_norm((float*)out, (float*)total, (const float*)x, (const float*)residual, (const float*)weight, rows, cols, eps);
    else
        add_norm((bf16*)out, (bf16*)total, (const bf16*)x, (const bf16*)residual, (const bf16*)weight, rows, cols, eps);
}

PDS_EXPORT void pds_silu_mul(void* out, const void* gate_up, int64_t rows, int64_t cols, int dtype) {
    if (dtype == kFloat32) silu_mul((float*)out, (const float*)gate_up, rows, cols);
    else silu_mul((bf16*)out, (const bf16*)gate_up, rows, cols);
}
