#pragma once
// Products by hand on a GPU (--matmul), in the place of cuBLASLt's: matmul_own.cu.
#include "01_single_gpu/ops/matmul.h"

namespace train70b {

// Whose kernels compute products on a GPU: cuBLASLt's, or one of four by hand.
enum class MatmulBy { cublaslt, naive, tiled, registers, mma };
inline MatmulBy matmul_by = MatmulBy::cublaslt;  // of this process
// Empty, or why these kernels compute no products of this kind: in one line that begins with their name.
std::string why_not_matmul(MatmulBy by, Device device, DType dtype);

namespace cuda {
void own_matmul(Tensor& c, const Tensor& a, const Tensor& b, Transpose transpose, float beta);  // as matmul_into()
}

}  // namespace train70b
