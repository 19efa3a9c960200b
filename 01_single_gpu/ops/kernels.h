#pragma once
// The kernels of each device, as ops.cpp calls them once shapes, dtypes and devices have been checked.
#include <cmath>

#include "01_single_gpu/ops/ops.h"

namespace train70b {

// What AdamW's kernels need of a step, in the precision T of the states:
// w <- w * keep - step_size * m / (sqrt(v) * inv_sqrt_correction2 + eps).
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

namespace train70b::cpu {
#include "01_single_gpu/ops/kernels.inc"
}
namespace train70b::cuda {
#include "01_single_gpu/ops/kernels.inc"
}
