#pragma once
// AdamW (Loshchilov & Hutter 2019, algorithm 2), one step for every element, with g = grad * grad_scale:
//   exp_avg    <- beta1 exp_avg    + (1 - beta1) g
//   exp_avg_sq <- beta2 exp_avg_sq + (1 - beta2) g^2
//   w          <- w - lr (m / (sqrt(v) + eps) + weight_decay w)
//   with the bias corrections m = exp_avg / (1 - beta1^step), v = exp_avg_sq / (1 - beta2^step)
#include <cmath>

#include "01_single_gpu/core/tensor.h"

namespace train70b {

struct AdamWStep {
    double lr, beta1, beta2, eps;
    double weight_decay;  // 0 for what is not a matrix
    double grad_scale;    // clipping: min(1, clip / norm)
    int64_t step;         // from 1: bias correction
};

// All tensors have the same number of elements. exp_avg, exp_avg_sq: stats_dtype of param, the dtype of the arithmetic.
// master: the fp32 copy that is updated and then rounded into a bf16 param; empty when param itself is fp32 or fp64.
void adamw(Tensor& param, Tensor& master, Tensor& exp_avg, Tensor& exp_avg_sq, const Tensor& grad,
           const AdamWStep& step);

// What the implementations need of a step, in the precision T of the moments; chapter 07's 8-bit AdamW as well:
//   w <- w * keep - step_size * exp_avg / (sqrt(exp_avg_sq) * inv_sqrt_correction2 + eps)
template <class T>
struct AdamWFactors {
    T beta1, beta2, eps, grad_scale, step_size, inv_sqrt_correction2, keep;
    explicit AdamWFactors(const AdamWStep& s)
        : beta1(T(s.beta1)),
          beta2(T(s.beta2)),
          eps(T(s.eps)),
          grad_scale(T(s.grad_scale)),
          step_size(T(T(s.lr) / (1.0 - std::pow(double(beta1), double(s.step))))),
          inv_sqrt_correction2(T(1.0 / std::sqrt(1.0 - std::pow(double(beta2), double(s.step))))),
          keep(T(1) - T(s.lr) * T(s.weight_decay)) {}
};

}  // namespace train70b
