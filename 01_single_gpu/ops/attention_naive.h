#pragma once
// The definition of attention, with every score in memory: what attention() and attention_backward() of ops.h, on
// either device, are tested against. Same arguments, CPU tensors of any float dtype, arithmetic in double.
#include "01_single_gpu/ops/ops.h"

namespace train70b {

void naive_attention(Tensor& out, Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                     const AttentionShape& shape);
void naive_attention_backward(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q, const Tensor& k,
                              const Tensor& v, const Tensor& out, const Tensor& lse, const AttentionShape& shape);

}  // namespace train70b
