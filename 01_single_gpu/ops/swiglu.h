#pragma once
// SwiGLU, the activation of the feed-forward layer (Shazeer 2020), with s = sigmoid(gate):
//   forward    h = silu(gate) * up,  silu(gate) = gate * s
//   backward   dgate = dh * up * s * (1 + gate * (1 - s)),  dup = dh * gate * s
// h, dh (R, F); gate_up, dgate_up (R, 2F) = [gate | up]; one dtype.
#include "01_single_gpu/core/tensor.h"

namespace train70b {

void swiglu(Tensor& h, const Tensor& gate_up);
void swiglu_backward(Tensor& dgate_up, const Tensor& dh, const Tensor& gate_up);

}  // namespace train70b
