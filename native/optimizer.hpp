// The optimizers, each on one row and its state, in place. src/hotrow/store/optimizers.py says what each equals.
//
// A step on a row with summed gradient g: clip_value on each value, clip_norm on the row, weight decay added,
// the update, then the bound on the row's values.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace hotrow {

enum class OptimizerKind : int { sgd = 0, momentum = 1, adagrad = 2, rowwise_adagrad = 3, adam = 4 };

struct Optimizer {
    OptimizerKind kind = OptimizerKind::sgd;
    float weight_decay = 0, clip_value = 0, clip_norm = 0, bound = 0;  // 0: off
    float momentum = 0, dampening = 0;
    bool nesterov = false;
    double beta1 = 0, beta2 = 0;
    float eps = 0, initial = 0;

    size_t state_dim(size_t dim) const {
        switch (kind) {
            case OptimizerKind::sgd: return 0;
            case OptimizerKind::rowwise_adagrad: return 1;
            case OptimizerKind::adam: return 2 * dim;
            default: return dim;
        }
    }

    float initial_state() const {
        return kind == OptimizerKind::adagrad || kind == OptimizerKind::rowwise_adagrad ? initial : 0.0f;
    }

    bool changes_gradient() const { return weight_decay != 0 || clip_value != 0 || clip_norm != 0; }
};

// What is the same for all rows of one call.
struct Step {
    float lr = 0;
    float bias1 = 1;       // Adam: 1 - beta1^t
    float bias2_root = 1;  // Adam: sqrt(1 - beta2^t)

    Step() = default;
    Step(const Optimizer& o, float rate, uint64_t t) : lr(rate) {
        if (o.kind == OptimizerKind::adam) {
            bias1 = static_cast<float>(1 - std::pow(o.beta1, static_cast<double>(t)));
            bias2_root = static_cast<float>(std::sqrt(1 - std::pow(o.beta2, static_cast<double>(t))));
        }
    }
};

// Sixteen fixed lanes: vectorised, and the same sum on every machine.
[[gnu::always_inline]] inline float sum_of_squares(const float* g, size_t n) {
    float lane[16] = {}, eight[8], four[4];
    size_t j = 0;
    for (; j + 16 <= n; j += 16)
        for (size_t k = 0; k < 16; ++k) lane[k] += g[j + k] * g[j + k];
    for (size_t k = 0; k < 16 && j + k < n; ++k) lane[k] += g[j + k] * g[j + k];
    for (size_t k = 0; k < 8; ++k) eight[k] = lane[k] + lane[k + 8];
    for (size_t k = 0; k < 4; ++k) four[k] = eight[k] + eight[k + 4];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// Clips and decays the gradient into scratch.
inline const float* prepare_gradient(const Optimizer& o, const float* row, const float* g, float* scratch, size_t n) {
    std::copy_n(g, n, scratch);
    if (o.clip_value > 0)
        for (size_t j = 0; j < n; ++j) scratch[j] = std::clamp(scratch[j], -o.clip_value, o.clip_value);
    if (o.clip_norm > 0) {
        const float norm = std::sqrt(sum_of_squares(scratch, n));
        if (norm > o.clip_norm) {
            const float factor = o.clip_norm / norm;
            for (size_t j = 0; j < n; ++j) scratch[j] *= factor;
        }
    }
    if (o.weight_decay > 0)
        for (size_t j = 0; j < n; ++j) scratch[j] += o.weight_decay * row[j];
    return scratch;
}

// row[n] and state are changed in place; scratch has room for n floats; first: the row was never updated before.
// Always inlined, so that a constant n unrolls its loops.
[[gnu::always_inline]] inline void update_row(const Optimizer& o, const Step& s, float* __restrict row, float* __restrict state,
                       const float* __restrict grad, float* scratch, size_t n, bool first) {
    const float* __restrict g = o.changes_gradient() ? prepare_gradient(o, row, grad, scratch, n) : grad;
    switch (o.kind) {
        case OptimizerKind::sgd:
            for (size_t j = 0; j < n; ++j) row[j] -= s.lr * g[j];
            break;
        case OptimizerKind::momentum:
            if (first)
                std::copy_n(g, n, state);
            else
                for (size_t j = 0; j < n; ++j) state[j] = o.momentum * state[j] + (1 - o.dampening) * g[j];
            if (o.nesterov)
                for (size_t j = 0; j < n; ++j) row[j] -= s.lr * (g[j] + o.momentum * state[j]);
            else
                for (size_t j = 0; j < n; ++j) row[j] -= s.lr * state[j];
            break;
        case OptimizerKind::adagrad:
            for (size_t j = 0; j < n; ++j) {
                state[j] += g[j] * g[j];
                row[j] -= s.lr * g[j] / (std::sqrt(state[j]) + o.eps);
            }
            break;
        case OptimizerKind::rowwise_adagrad: {
            state[0] += sum_of_squares(g, n) / static_cast<float>(n);
            const float rate = s.lr / (std::sqrt(state[0]) + o.eps);
            for (size_t j = 0; j < n; ++j) row[j] -= rate * g[j];
            break;
        }
        case OptimizerKind::adam: {
            float* __restrict first_moment = state;
            float* __restrict second_moment = state + n;
            const float b1 = static_cast<float>(o.beta1), b2 = static_cast<float>(o.beta2);
            const float c1 = static_cast<float>(1 - o.beta1), c2 = static_cast<float>(1 - o.beta2);
            const float rate = s.lr * s.bias2_root / s.bias1;
            for (size_t j = 0; j < n; ++j) {
                first_moment[j] = b1 * first_moment[j] + c1 * g[j];
                second_moment[j] = b2 * second_moment[j] + c2 * g[j] * g[j];
                row[j] -= rate * first_moment[j] / (std::sqrt(second_moment[j]) + o.eps);
            }
            break;
        }
    }
    if (o.bound > 0)
        for (size_t j = 0; j < n; ++j) row[j] = std::clamp(row[j], -o.bound, o.bound);
}

}  // namespace hotrow
