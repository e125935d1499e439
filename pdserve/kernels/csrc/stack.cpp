// All layers of a dense decoder in one call: the same kernels in the same order as when each is called by itself, so
// the same bits. Rows that feed a quantised layer are made (normed, gated) and quantised in one go and never stored.
#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "ops.h"
#include "parallel.h"
#include "phases.h"
#include "quantised.h"
#include "rows.h"

namespace {

constexpr int64_t kWorth = 1 << 14;

// A linear layer: quant, or an exact one of the stack's dtype.
struct StackLinear {
    const QuantLinear* quant;
    const void* weight;
    const float* bias;
    int64_t num_out, num_in;
};

struct StackLayer {
    StackLinear qkv, out, gate_up, down;
    const void *mlp_norm, *next_norm;  // before the MLP; before the next layer, or the last norm
    const void *q_norm, *k_norm;       // or null
    int64_t window;
    float scale, eps;  // eps: of q_norm and k_norm
};

struct StackDesc {
    const StackLayer* layers;
    StackLinear head;
    const void* first_norm;
    int64_t num_layers, hidden, num_heads;
    float eps;
    int dtype;
};

// One step. residual: [tokens][hidden], the embeddings; used up. rows: whose logits are wanted, ascending.
struct StackStep {
    const KVDesc* kv;
    const AttentionDesc* meta;
    const float *cos, *sin;
    const int32_t* slots;
    void* residual;
    const int64_t* rows;
    float* logits;
    int64_t tokens, num_rows;
    double* seconds;  // by Phase, added to; or null
};

int64_t widest(const StackDesc& s, int64_t StackLinear::* size) {
    int64_t most = 0;
    for (int64_t i = 0; i < s.num_layers; i++)
        for (const StackLinear* l : {&s.layers[i].qkv, &s.layers[i].out, &s.layers[i].gate_up, &s.layers[i].down})
            most = std::max(most, l->*size);
    return most;
}

template <class T> class Run {
  public:
    Run(const StackDesc& stack, const StackStep& step) : stack_(stack), step_(step), rows_(step.tokens), clock_(step.seconds) {
        static thread_local Scratch scratch;
        const int64_t in = std::max(widest(stack, &StackLinear::num_in), stack.head.num_in);
        const int64_t wide = rows_ * std::max(widest(stack, &StackLinear::num_out), in);
        const size_t codes = rows8_bytes(rows_, in, true), each = (wide * sizeof(T) + 127) / 64 * 64;
        char* at = scratch.get<char>(codes + 64 + 4 * each);
        codes_ = at, at += (codes + 63) / 64 * 64;
        wide_ = reinterpret_cast<T*>(at), narrow_ = reinterpret_cast<T*>(at + each);
        heads_ = reinterpret_cast<T*>(at + 2 * each), made_ = reinterpret_cast<T*>(at + 3 * each);
        residual_ = static_cast<T*>(step.residual);
    }

    int all() {
        for (int64_t i = 0; i < stack_.num_layers; i++) {
            const StackLayer& layer = stack_.layers[i];
            if (const int status = attend(layer, i)) return status;
            if (i + 1 == stack_.num_layers && !keep_wanted(layer.out.num_in)) return kOk;
            linear(kOut, layer.out, heads_, narrow_);
            made(kGateUp, layer.gate_up, wide_, sum_and_norm(layer.mlp_norm));
            const int64_t width = layer.down.num_in;
            made(kDown, layer.down, narrow_,
                 [&, width](int64_t r, T* out) { silu_mul_row(out, wide_ + r * 2 * width, width); });
        }
        const StackLayer& last = stack_.layers[stack_.num_layers - 1];
        made(kHead, stack_.head, step_.logits, sum_and_norm(last.next_norm), kFloat32);
        return kOk;
    }

  private:
    static constexpr int kType = sizeof(T) == 4 ? kFloat32 : kBfloat16;

    // Up to the heads' results, [rows][heads * dim].
    int attend(const StackLayer& layer, int64_t i) {
        const int64_t hidden = stack_.hidden;
        const auto norm = [&](int64_t r, T* out) {
            norm_row(out, residual_ + r * hidden, static_cast<const T*>(stack_.first_norm), hidden, stack_.eps);
        };
        if (i == 0) made(kQkv, layer.qkv, wide_, norm);
        else made(kQkv, layer.qkv, wide_, sum_and_norm(stack_.layers[i - 1].next_norm));
        const int status =
            pds_rope_and_write_kv(narrow_, wide_, step_.cos, step_.sin, step_.kv, i, step_.slots, rows_, stack_.num_heads,
                                  layer.q_norm, layer.k_norm, layer.eps, kType);
        clock_.lap(kWrite);
        if (status != kOk) return status;
        const int attended = pds_paged_attention(heads_, narrow_, step_.kv, i, step_.meta, stack_.num_heads, layer.scale,
                                                 layer.window, kType);
        clock_.lap(kAttention);
        return attended;
    }

    // Moves the wanted rows to the front; false if there are none.
    bool keep_wanted(int64_t width) {
        for (int64_t r = 0; r < step_.num_rows; r++) {
            const int64_t from = step_.rows[r];
            std::memmove(heads_ + r * width, heads_ + from * width, width * sizeof(T));
            std::memmove(residual_ + r * stack_.hidden, residual_ + from * stack_.hidden, stack_.hidden * sizeof(T));
        }
        rows_ = step_.num_rows;
        return rows_ > 0;
    }

    // Makes a row: residual += the last linear's result, then its norm.
    auto sum_and_norm(const void* weight) {
        return [this, weight](int64_t r, T* out) {
            const int64_t at = r * stack_.hidden;
            add_norm_row(out, residual_ + at, narrow_ + at, residual_ + at, static_cast<const T*>(weight), stack_.hidden,
                         stack_.eps);
        };
    }

    template <class Body> void each_row(int64_t cols, const Body& body) {
        parallel_for_runs(rows_, threads_for(rows_ * cols, kWorth), body);
    }

    // out = the layer's result for rows that make(row, to) makes.
    template <class Make>
    void made(Phase phase, const StackLinear& l, void* out, const Make& make, int out_dtype = kType) {
        if (l.quant == nullptr) {
            each_row(l.num_in, [&](int64_t r) { make(r, made_ + r * l.num_in); });
            clock_.lap(kRows);
            pds_linear(out, made_, l.weight, l.bias, rows_, l.num_out, l.num_in, kType, out_dtype == kFloat32);
            clock_.lap(phase);
            return;
        }
        const bool grouped = by_group(*l.quant);
        const Rows8 to = carve_rows8(codes_, rows_, l.num_in, grouped);
        each_row(l.num_in, [&](int64_t r) {
            static thread_local Scratch scratch;
            T* row = scratch.get<T>(l.num_in);
            make(r, row);
            quantise_row(to, r, row, l.num_in, grouped);
        });
        clock_.lap(kRows);
        quant_linear(*l.quant, to, rows_, out, out_dtype);
        clock_.lap(phase);
    }

    void linear(Phase phase, const StackLinear& l, const T* x, T* out) {
        if (l.quant == nullptr) {
            pds_linear(out, x, l.weight, l.bias, rows_, l.num_out, l.num_in, kType, kType == kFloat32);
            clock_.lap(phase);
            return;
        }
        const bool grouped = by_group(*l.quant);
        const Rows8 to = carve_rows8(codes_, rows_, l.num_in, grouped);
        each_row(l.num_in, [&](int64_t r) { quantise_row(to, r, x + r * l.num_in, l.num_in, grouped); });
        clock_.lap(kRows);
        quant_linear(*l.quant, to, rows_, out, kType);
        clock_.lap(phase);
    }

    const StackDesc& stack_;
    const StackStep& step_;
    int64_t rows_;
    PhaseClock clock_;
    char* codes_;
    T *wide_, *narrow_, *heads_, *made_, *residual_;
};

}  // namespace

PDS_EXPORT int pds_stack(const StackDesc* stack, const StackStep* step) {
    if (stack->dtype == kFloat32) return Run<float>(*stack, *step).all();
    return Run<bf16>(*stack, *step).all();
}

// The first of the greatest values of each row, or -1 where a value is not a finite number.
PDS_EXPORT void pds_best(const float* values, int64_t rows, int64_t cols, int64_t* best) {
    parallel_for(rows, threads_for(rows * cols, 1 << 17), [&](int64_t r) {
        const float* row = values + r * cols;
        vf top = vset(-INFINITY), rest = vzero();
        for_vectors(cols, [&](int64_t i, auto m) {
            const vf v = load_as_float(row + i, m);
            rest = fma(v, vzero(), rest);  // a NaN from then on, where v is not finite
        });
        int64_t i = 0;
        for (; i + VW <= cols; i += VW) top = vmax(top, vload(row + i));
        float most = max_lanes(top);
        for (; i < cols; i++) most = std::max(most, row[i]);
        best[r] = std::isnan(sum_lanes(rest)) ? -1 : std::find(row, row + cols, most) - row;
    });
}
