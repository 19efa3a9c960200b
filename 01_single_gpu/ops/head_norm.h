#pragma once
// RMSNorm of each head of q and k before RoPE (Qwen3; Henry et al. 2020 normalise queries and keys). For each head x of
// D numbers, with the weight of q or of k, which all heads and tokens share:
//   forward    y = x * inv_rms * weight,  inv_rms = 1 / sqrt(mean(x^2) + eps)
//   backward   that of rmsnorm.h, for each head; dweight sums over rows and heads
// qkv and y (R, (H+2K)*D) = [q | k | v]; v is not normalised. Nothing is kept for the backward pass but qkv itself:
// inv_rms takes one more pass over D numbers.
#include "01_single_gpu/core/tensor.h"

namespace train70b {

// y = [normalised q | normalised k | v]. q_weight, k_weight (D). kv_width: K*D.
void head_norm(Tensor& y, const Tensor& qkv, const Tensor& q_weight, const Tensor& k_weight, int64_t kv_width,
               double eps);

// Turns the gradient of y into that of qkv, in place; adds to the weights' gradients (D), which may be fp32 while the
// rest is bf16.
void head_norm_backward(Tensor& grad, Tensor& dq_weight, Tensor& dk_weight, const Tensor& qkv, const Tensor& q_weight,
                        const Tensor& k_weight, int64_t kv_width, double eps);

}  // namespace train70b
