#pragma once
// Scaled dot-product attention with grouped queries. For each sequence and query head h, with key/value head
// h / (H / K) (Vaswani et al. 2017, eq. 1; Dao et al. 2022, algorithms 1 and 4):
//   forward    S = q k^T / sqrt(D), -inf where the mask hides a key;  lse = log sum_j e^S;  P = e^(S - lse);  out = P v
//   backward   dP = dout v^T;  dS = P (dP - sum(dout * out))
//              dq = dS k / sqrt(D);  dk = dS^T q / sqrt(D);  dv = P^T dout
// With `causal`, query i of Tq sees the keys j <= i + Tk - Tq. A query that sees no key gets out = 0 and lse = -inf.
//
// q, out, dq, dout (B*Tq, H*D);  k, v, dk, dv (B*Tk, K*D);  lse (B*Tq, H) stats_dtype: the log of the sum of the
// exponentials of each row of scores.
//
//   attention.cpp                the definition, naive_attention(), with its T x T matrix; checks and dispatch
//   attention_tiled.cpp          the CPU: heads over threads, and the choice between the two files below
//   attention_tiled_kernel.cpp   one head, tile by tile with an online softmax: no T x T matrix is stored
//   attention_tiled_avx512.cpp   the same compiled for AVX-512
//   attention_cuda.cu            the GPU in plain CUDA, fp32 arithmetic, any head size
//   attention_mma.cu             the GPU's tensor cores, bf16, head sizes 64 and 128
#include "01_single_gpu/core/tensor.h"
#include "01_single_gpu/ops/attention_shape.h"

namespace train70b {

void attention(Tensor& out, Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
               const AttentionShape& shape);

// out and lse are arguments: ring attention passes the merged values of all its steps, and gets this step's share of
// the gradients (chapter 06). dq, dk, dv may be fp32 while the rest is bf16.
void attention_backward(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q, const Tensor& k,
                        const Tensor& v, const Tensor& out, const Tensor& lse, const AttentionShape& shape);

// Merges the results for two sets of keys (chapter 06): out (R, H*D) and lse (R, H), in the stats_dtype of part_out
// (R, H*D), become those of both sets. An lse of -inf stands for a set without keys.
//   l = log(e^lse + e^part_lse),  out = out e^(lse - l) + part_out e^(part_lse - l),  lse = l
void merge_attention(Tensor& out, Tensor& lse, const Tensor& part_out, const Tensor& part_lse);

// The definition, with every score in memory: what the implementations above are tested against. The same arguments;
// CPU tensors of any float dtype, arithmetic in double.
void naive_attention(Tensor& out, Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                     const AttentionShape& shape);
void naive_attention_backward(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q, const Tensor& k,
                              const Tensor& v, const Tensor& out, const Tensor& lse, const AttentionShape& shape);

}  // namespace train70b
