#pragma once
// The kernels of each device, as ops.cpp calls them once shapes, dtypes and devices have been checked.
#include <cmath>

#include "01_single_gpu/ops.h"

namespace train70b {

// What AdamW's kernels need of a step: w <- w * keep - step_size * m / (sqrt(v) * inv_sqrt_correction2 + eps).
struct AdamWFactors {
    float step_size, inv_sqrt_correction2, keep;
    explicit AdamWFactors(const AdamWStep& s)
        : step_size(float(s.lr / (1.0 - std::pow(double(s.beta1), double(s.step))))),
          inv_sqrt_correction2(float(1.0 / std::sqrt(1.0 - std::pow(double(s.beta2), double(s.step))))),
          keep(1.0f - s.lr * s.weight_decay) {}
};

}  // namespace train70b

namespace train70b::cpu {
#include "01_single_gpu/kernels.inc"
}
namespace train70b::cuda {
#include "01_single_gpu/kernels.inc"
}
