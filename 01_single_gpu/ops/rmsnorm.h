#pragma once
// RMSNorm (Zhang & Sennrich 2019, eq. 4), for each row x of E numbers:
//   forward    inv_rms = 1 / sqrt(mean(x^2) + eps),  y = x * inv_rms * weight
//   backward   with n = x * inv_rms the normalised row and g = dy * weight:
//              dx = inv_rms * (g - n * mean(g * n)),  dweight = sum over the rows of dy * n
// x, y, dx, dy (R, E) and weight (E) have one dtype; inv_rms (R) has its stats_dtype and is kept for the backward pass.
#include "01_single_gpu/core/tensor.h"

namespace train70b {

void rmsnorm(Tensor& y, Tensor& inv_rms, const Tensor& x, const Tensor& weight, double eps);

// With the residual addition fused in: sum = a + b, then y = rmsnorm(sum). All four (R, E).
void add_rmsnorm(Tensor& sum, Tensor& y, Tensor& inv_rms, const Tensor& a, const Tensor& b, const Tensor& weight,
                 double eps);

// y from x and the stored inv_rms, bitwise equal to what rmsnorm() gave: pointwise recomputation.
void rmsnorm_recompute(Tensor& y, const Tensor& x, const Tensor& inv_rms, const Tensor& weight);

// Writes dx and adds to dweight (E), which may be fp32 while the rest is bf16.
void rmsnorm_backward(Tensor& dx, Tensor& dweight, const Tensor& dy, const Tensor& x, const Tensor& inv_rms,
                      const Tensor& weight);

// ---- of each head ---------------------------------------------------------------------------------------------------
// RMSNorm of each head of q and k before RoPE (Qwen3; Henry et al. 2020 normalise queries and keys), with the weight of
// q or of k, which all heads and tokens share; dweight sums over rows and heads. qkv and y (R, (H+2K)*D) = [q | k | v],
// of which v is not normalised. Nothing is kept for the backward pass but qkv itself: inv_rms takes one more pass over
// D numbers.

// y = [normalised q | normalised k | v]. q_weight, k_weight (D). kv_width: K*D.
void head_norm(Tensor& y, const Tensor& qkv, const Tensor& q_weight, const Tensor& k_weight, int64_t kv_width,
               double eps);

// Turns the gradient of y into that of qkv, in place; adds to the weights' gradients (D), which may be fp32 while the
// rest is bf16.
void head_norm_backward(Tensor& grad, Tensor& dq_weight, Tensor& dk_weight, const Tensor& qkv, const Tensor& q_weight,
                        const Tensor& k_weight, int64_t kv_width, double eps);

}  // namespace train70b
