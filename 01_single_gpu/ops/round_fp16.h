#pragma once
// Rounding of fp32 tensors to the values of fp16: sign, five bits of exponent, ten of mantissa.
#include "01_single_gpu/core/tensor.h"

namespace train70b {

float to_fp16(float x);  // to nearest, ties to even; what rounds to more than 65504 becomes infinite

void round_fp16(Tensor& x);  // each element of x (fp32), on the CPU

}  // namespace train70b
