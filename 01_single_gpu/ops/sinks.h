#pragma once
// Attention sinks (gpt-oss; Xiao et al. 2023): a learned logit s for each head that takes part in every softmax and has
// no value. A query may then attend to nothing. On the finished attention of all keys:
//   forward    lse' = log(e^lse + e^s);  out' = out e^(lse - lse')
//   backward   attention_backward with out' and lse';  ds = -sum over the rows of e^(s - lse') sum(dout * out')
//
// out, dout (R, H*D);  lse (R, H) stats_dtype;  sinks, dsinks (H).
#include "01_single_gpu/core/tensor.h"

namespace train70b {

void add_sinks(Tensor& out, Tensor& lse, const Tensor& sinks);

// Adds to dsinks, which may be fp32 while the rest is bf16. Workspace: as large as lse.
void add_sinks_backward(Tensor& dsinks, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& sinks);

}  // namespace train70b
