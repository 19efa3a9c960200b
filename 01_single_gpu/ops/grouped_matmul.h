#pragma once
// A linear layer for each of G groups of consecutive rows, rows[g] of them (any number, also none): experts.
// w (G out, in): G matrices.
//   forward   y_g  = x_g W_g^T          y (S, out), x (S, in)
//   dgrad     dx_g = dy_g W_g
//   wgrad     dW_g += dy_g^T x_g
//
// One product per group, as matmul_into's. On a GPU, where a single product of forward or dgrad would occupy a part of
// it, cuBLAS computes all of them in one call. Those of wgrad are as large however few rows a group has.
#include "01_single_gpu/ops/matmul.h"

namespace train70b {

void grouped_forward(Tensor& y, const Tensor& x, const Tensor& w, const std::vector<int64_t>& rows);
void grouped_dgrad(Tensor& dx, const Tensor& dy, const Tensor& w, const std::vector<int64_t>& rows);
void grouped_wgrad(Tensor& dw, const Tensor& dy, const Tensor& x, const std::vector<int64_t>& rows);

namespace cuda {  // grouped_matmul.cu
// c_g = a_g op(W_g), by one call; op: Transpose::b (forward) or none (dgrad). Requires in_one_call().
void grouped_matmul(Tensor& c, const Tensor& a, const Tensor& w, const std::vector<int64_t>& rows, Transpose transpose);
// Whether cuBLAS takes these matrices, and a group's product has, on average, fewer tiles of 128 x 128 than the GPU has
// multiprocessors (each occupies one).
bool in_one_call(const Tensor& c, const Tensor& a, const Tensor& w, const std::vector<int64_t>& rows);
}  // namespace cuda

}  // namespace train70b
