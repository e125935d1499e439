// Routing around the experts of a mixture: choice, order by expert, weighted sum. Rows are independent of each other
// everywhere but in the order, which moves rows and changes none.
#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace {

constexpr int64_t kWorth = 1 << 14;

// The index of the largest score not yet taken; the lowest of equal ones, and always some index, even among NaNs.
int64_t best_left(const float* scores, const bool* taken, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || scores[i] > scores[best])) best = i;
    return best;
}

void softmax(float* probs, const float* logits, int64_t count) {
    float most = logits[0];
    for (int64_t i = 1; i < count; i++) most = std::max(most, logits[i]);
    for_vectors(count, [&](int64_t i, auto m) {
        store_rounded(probs + i, vexp(vsub(load_as_float(logits + i, m), vset(most))), m);
    });
    // vexp bounds its argument, so what is not a number is carried by the sum.
    float sum = 0;
    for (int64_t i = 0; i < count; i++) sum += probs[i] + 0.0f * logits[i];
    for (int64_t i = 0; i < count; i++) probs[i] /= sum;
}

void sigmoids(float* probs, const float* logits, int64_t count) {
    for_vectors(count, [&](int64_t i, auto m) {
        const vf x = load_as_float(logits + i, m), one = vset(1.0f);
        store_rounded(probs + i, vdiv(one, vadd(one, vexp(vsub(vzero(), x)))), m);
    });
    for (int64_t i = 0; i < count; i++) probs[i] += 0.0f * logits[i];
}

// Marks the experts of all but the best groups as taken.
void leave_groups(bool* taken, const float* choice, int64_t size, int64_t groups, int64_t top_groups, bool two_best) {
    static thread_local std::vector<float> worth;
    static thread_local Scratch scratch;
    worth.resize(groups);
    bool* kept = scratch.get<bool>(groups);
    for (int64_t g = 0; g < groups; g++) {
        kept[g] = false;
        float best = choice[g * size], second = -INFINITY;
        for (int64_t i = 1; i < size; i++) {
            const float x = choice[g * size + i];
            second = std::max(second, std::min(best, x));
            best = std::max(best, x);
        }
        worth[g] = two_best && size > 1 ? best + second : best;
    }
    for (int64_t k = 0; k < top_groups; k++) kept[best_left(worth.data(), kept, groups)] = true;
    for (int64_t g = 0; g < groups; g++) std::fill(taken + g * size, taken + (g + 1) * size, !kept[g]);
}

// One token's sum over the experts that computed it; see combine in routing.py for why it has this form.
template <class T> struct Sum {
    const T* rows;
    const int64_t* at;
    const float* weights;
    int64_t top_k, cols;
    float total;

    template <class M> PDS_INLINE vf columns(int64_t i, M m) const {
        int64_t k = 0;
        while (k < top_k && at[k] < 0) k++;
        if (k == top_k) return vzero();
        const vf anchor = load_as_float(rows + at[k] * cols + i, m);
        vf sum = vmul(vset(total), anchor);
        for (k++; k < top_k; k++)
            if (at[k] >= 0)
                sum = fma(vset(weights[k]), vsub(load_as_float(rows + at[k] * cols + i, m), anchor), sum);
        return sum;
    }
};

template <class T>
void combine(T* out, const T* rows, const int64_t* at, const float* weights, const float* totals, const T* shared,
             const float* gate, int64_t tokens, int64_t top_k, int64_t cols) {
    parallel_for_runs(tokens, threads_for(tokens * top_k * cols, kWorth), [&](int64_t t) {
        const Sum<T> sum{rows, at + t * top_k, weights + t * top_k, top_k, cols, totals[t]};
        const vf one = vset(1.0f);
        const vf scale = gate == nullptr ? one : vdiv(one, vadd(one, vexp(vset(-gate[t]))));
        for_vectors(cols, [&](int64_t i, auto m) {
            vf x = sum.columns(i, m);
            if (shared != nullptr) {
                x = fma(scale, load_as_float(shared + t * cols + i, m), x);
            }
            store_rounded(out + t * cols + i, x, m);
        });
    });
}

}  // namespace

// bias: added to the scores for the choice alone, or null. groups, top_groups: only experts of the best groups count.
// sigmoid: scores are sigmoids and a group's worth is its two best, otherwise softmax and its best.
PDS_EXPORT void pds_route_top_k(int64_t* experts, float* weights, const float* logits, const float* bias, int64_t tokens,
                                int64_t num_experts, int64_t top_k, int64_t groups, int64_t top_groups, int sigmoid,
                                int normalise, float scale) {
    parallel_for_runs(tokens, threads_for(tokens * num_experts * top_k, kWorth), [&](int64_t t) {
        static thread_local std::vector<float> probs, choice;
        static thread_local Scratch scratch;
        probs.resize(num_experts);
        bool* taken = scratch.get<bool>(num_experts);
        std::fill(taken, taken + num_experts, false);
        (sigmoid ? sigmoids : softmax)(probs.data(), logits + t * num_experts, num_experts);
        choice = probs;
        for (int64_t i = 0; bias != nullptr && i < num_experts; i++) choice[i] += bias[i];
        if (top_groups < groups) leave_groups(taken, choice.data(), num_experts / groups, groups, top_groups, sigmoid);
        float sum = 0;
        for (int64_t k = 0; k < top_k; k++) {
            const int64_t best = best_left(choice.data(), taken, num_experts);
            taken[best] = true;
            experts[t * top_k + k] = best;
            sum += weights[t * top_k + k] = probs[best];
        }
        for (int64_t k = 0; k < top_k; k++)
            weights[t * top_k + k] = scale * (normalise ? weights[t * top_k + k] / sum : weights[t * top_k + k]);
    });
}

// offsets: num_slots + 1. row_of: per choice its sorted row, or -1. token_of: per sorted row its token. Returns rows.
PDS_EXPORT int64_t pds_sort_by_slot(int64_t* offsets, int64_t* row_of, int64_t* token_of, const int64_t* slots,
                                    int64_t tokens, int64_t top_k, int64_t num_slots) {
    const int64_t choices = tokens * top_k;
    std::fill(offsets, offsets + num_slots + 1, 0);
    for (int64_t i = 0; i < choices; i++)
        if (slots[i] >= 0) offsets[slots[i] + 1]++;
    for (int64_t s = 0; s < num_slots; s++) offsets[s + 1] += offsets[s];
    static thread_local std::vector<int64_t> next;
    next.assign(offsets, offsets + num_slots);
    for (int64_t i = 0; i < choices; i++) {
        row_of[i] = slots[i] < 0 ? -1 : next[slots[i]]++;
        if (row_of[i] >= 0) token_of[row_of[i]] = i / top_k;
    }
    return offsets[num_slots];
}

PDS_EXPORT void pds_combine(void* out, const void* rows, const int64_t* at, const float* weights, const float* totals,
                            const void* shared, const float* gate, int64_t tokens, int64_t top_k, int64_t cols,
                            int dtype) {
    if (dtype == kFloat32)
        combine((float*)out, (const float*)rows, at, weights, totals, (const float*)shared, gate, tokens, top_k, cols);
    else
        combine((bf16*)out, (const bf16*)rows, at, weights, totals, (const bf16*)shared, gate, tokens, top_k, cols);
}
