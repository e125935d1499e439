// Entry points of the quantised linear layers: a row is quantised once, then multiplied.
#include "quantised.h"

#include "parallel.h"

namespace {

template <class T>
void quantise_rows(const Rows8& to, const T* x, int64_t rows, int64_t cols, bool grouped) {
    parallel_for_runs(rows, threads_for(rows * cols, 1 << 15),
                      [&](int64_t r) { quantise_row(to, r, x + r * cols, cols, grouped); });
}

}  // namespace

PDS_EXPORT int64_t pds_int8_panel_width() { return int8_panel_width(); }

// x: [rows][num_in] of dtype.
PDS_EXPORT void pds_quant_linear(void* out, const void* x, const QuantLinear* linear, int64_t rows, int dtype,
                                 int out_dtype) {
    if (rows == 0) return;
    static thread_local Scratch scratch;
    const bool grouped = by_group(*linear);
    const Rows8 to = carve_rows8(scratch.get<char>(rows8_bytes(rows, linear->num_in, grouped)), rows, linear->num_in, grouped);
    if (dtype == kFloat32) quantise_rows(to, static_cast<const float*>(x), rows, linear->num_in, grouped);
    else quantise_rows(to, static_cast<const bf16*>(x), rows, linear->num_in, grouped);
    quant_linear(*linear, to, rows, out, out_dtype);
}
