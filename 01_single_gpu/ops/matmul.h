#pragma once
// Matrix product, by oneDNN on the CPU (OpenBLAS in fp64, and where CMake finds no oneDNN) and on a GPU by cuBLASLt, or
// by hand (matmul_own.h). A linear layer is three of them:
//   forward   Y  (R, out)  = X (R, in) W (out, in)^T         Transpose::b
//   dgrad     dX (R, in)   = dY (R, out) W (out, in)         Transpose::none
//   wgrad     dW (out, in) = dY (R, out)^T X (R, in)         Transpose::a
#include "01_single_gpu/core/tensor.h"

namespace train70b {

enum class Transpose { none, a, b };
// vary: other products with these matrices have other numbers of rows of a. A GPU then chooses an algorithm for several
// of them at once: a choice takes longer than a product, and each is kept.
enum class Rows { fixed, vary };

// c (M, N) = op(a) op(b) + beta c.   none: a (M, K), b (K, N).   a: a (K, M), b (K, N).   b: a (M, K), b (N, K).
// a and b have the same dtype; c has it too, or is fp32 while they are bf16: weight gradients are summed in fp32 inside
// the product. With beta 0, c may be uninitialised.
void matmul_into(Tensor& c, const Tensor& a, const Tensor& b, Transpose transpose = Transpose::none, float beta = 0,
                 Rows rows = Rows::fixed);

// op(a) op(b) in a new tensor (M, N) with the dtype of a, booked as `kind`.
Tensor matmul(const Tensor& a, const Tensor& b, Transpose transpose = Transpose::none,
              Memory kind = Memory::activations);

namespace cpu {
std::string product_kernels(DType dtype);  // "oneDNN avx512_core_bf16", "OpenBLAS Haswell"; others round otherwise
// matmul_onednn.cpp. False: this CPU or build has no such product by oneDNN. "": no kernels in this build.
bool onednn_matmul_into(Tensor& c, const Tensor& a, const Tensor& b, Transpose transpose, float beta);
std::string onednn_kernels();
decltype(train70b::matmul_into) matmul_into;  // matmul.cpp; chapter 07 multiplies its dequantised operands with it
}  // namespace cpu
namespace cuda {              // matmul.cu
int64_t matmul_algorithms();  // chosen so far
}

}  // namespace train70b
