#pragma once
// The bias of a linear layer, of which the product is another op:
//   forward    y = y + bias, in every row
//   backward   dbias = sum over the rows of dy; the gradient of the product is dy itself
// y and dy (R, N), bias and dbias (N).
#include "01_single_gpu/core/tensor.h"

namespace train70b {

void add_bias(Tensor& y, const Tensor& bias);

// Adds to dbias, which may be fp32 while the rest is bf16.
void add_bias_backward(Tensor& dbias, const Tensor& dy);

}  // namespace train70b
