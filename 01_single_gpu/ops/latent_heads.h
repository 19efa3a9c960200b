#pragma once
// Between the products of multi-head latent attention (complete/latent_attention.h) and attention. A head has D = N + P
// numbers of q and k, of which RoPE rotates the last P; those of k are the same in all heads. It has N of v, and zeros
// up to the D of attention's kernels.
//
//   q (R, H*D) = per head [N of q_in | P of q_in, rotated]        q_in (R, H*D)
//   k (R, H*D) = per head [N of kv   | k_rope, rotated]           kv (R, H*2N), k_rope (R, P)
//   v (R, H*D) = per head [the other N of kv | 0]
//
// Pairs are (2i, 2i+1), as in DeepSeek's weights, where rope.h has (i, i + D/2).
#include "01_single_gpu/ops/rope.h"

namespace train70b {

void latent_heads(Tensor& q, Tensor& k, Tensor& v, const Tensor& q_in, const Tensor& kv, const Tensor& k_rope,
                  const Tensor& positions, const Rope& rope);  // rope.head_dim: P
void latent_heads_backward(Tensor& dq_in, Tensor& dkv, Tensor& dk_rope, const Tensor& dq, const Tensor& dk,
                           const Tensor& dv, const Tensor& positions, const Rope& rope);

// Columns [to_begin, to_begin + width) of each row of `to` = those of `from` from from_begin on.
void copy_columns(Tensor& to, int64_t to_begin, const Tensor& from, int64_t from_begin, int64_t width);

}  // namespace train70b
