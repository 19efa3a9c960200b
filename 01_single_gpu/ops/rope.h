#pragma once
// Rotary position embedding (Su et al. 2021, eq. 34), in the rotate-half convention of the Hugging Face checkpoints.
// In each head, elements i and i + D/2 form a pair, which a token at position p rotates by the angle p * inv_freq[i]:
//   (a, b) -> (a cos - b sin, b cos + a sin)
// The gradient is the inverse rotation. Angles are computed in double: positions may be a million.
#include "01_single_gpu/core/tensor.h"
#include "01_single_gpu/ops/attention_shape.h"

namespace train70b {

struct Rope {
    int head_dim = 0;                       // D: even, at most kMaxHeadDim
    double inv_freq[kMaxHeadDim / 2] = {};  // radians per position, for each pair (i, i + D/2)
};

// Splits qkv (R, (H+2K)*D) into q (R, H*D), k (R, K*D) and v (R, K*D), and rotates q and k by positions (R) i32.
void split_rope(Tensor& q, Tensor& k, Tensor& v, const Tensor& qkv, const Tensor& positions, const Rope& rope);

// dqkv (R, (H+2K)*D) = [dq and dk rotated back | dv].
void split_rope_backward(Tensor& dqkv, const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& positions,
                         const Rope& rope);

}  // namespace train70b
