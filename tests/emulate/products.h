#pragma once
// A product of the emulated libraries, cublaslt.cpp and cublas.cpp: D = alpha op(A) op(B) + beta C, column-major.
#include <cublasLt.h>

#include <array>
#include <string>

#include "emulate.h"

namespace emulate {

using ScaleMode = cublasLtMatmulMatrixScale_t;
constexpr ScaleMode kTensor = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
constexpr ScaleMode kOuter = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
constexpr ScaleMode kVec128 = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
constexpr ScaleMode kBlock128 = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;

enum { A, B, C, D };

struct Operation {
    cublasComputeType_t compute;
    cudaDataType_t scale;
    cublasOperation_t transa = CUBLAS_OP_N, transb = CUBLAS_OP_N;
    std::array<ScaleMode, 2> modes = {kTensor, kTensor};
    bool operator==(const Operation&) const = default;
};
struct Layout {
    cudaDataType_t type;
    int64_t rows, cols, ld;
    bool operator==(const Layout&) const = default;

    bool fp8() const { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
    int64_t element() const { return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF ? 2 : 1; }
    size_t bytes() const { return size_t(((cols - 1) * ld + rows) * element()); }
};

// A product without its data: what a heuristic is asked for, and what its algorithm is good for.
struct Product {
    Operation operation;
    std::array<Layout, 4> x;
    bool operator==(const Product&) const = default;

    bool ta() const { return operation.transa != CUBLAS_OP_N; }
    bool tb() const { return operation.transb != CUBLAS_OP_N; }
    int64_t m() const { return ta() ? x[A].cols : x[A].rows; }
    int64_t n() const { return tb() ? x[B].rows : x[B].cols; }
    int64_t k() const { return ta() ? x[A].rows : x[A].cols; }
};
struct Data {
    std::array<const void*, 3> in;
    void* out;
    std::array<const void*, 2> scales;
    float alpha, beta;

    const void* matrix(size_t i) const { return i == D ? out : in[i]; }
};

const char* reason_against(const Product& product);  // why no library takes it, or nullptr
std::string to_string(const Product& product);
size_t scale_bytes(ScaleMode mode, int64_t rows, int64_t k);  // of rows of op(A) or columns of op(B), by k terms
void multiply(const Product& product, const Data& data, int64_t parts = 1);  // parts of each sum

bool overlap(const void* p, size_t p_bytes, const void* q, size_t q_bytes);
bool fits(const void* p, size_t bytes, uint32_t alignment);  // aligned, and within one allocation of the device

}  // namespace emulate
