#pragma once
// Products with cuBLASLt: what matmul.cu, grouped_matmul.cu and chapter 07's fp8_cuda.cu share. Defined in matmul.cu.
#include <cublasLt.h>

#include <array>
#include <functional>
#include <string>

#include "01_single_gpu/core/cuda.cuh"
#include "01_single_gpu/ops/matmul.h"

#define CUBLAS_CHECK(call)                                                                           \
    do {                                                                                             \
        const cublasStatus_t cublas_status = (call);                                                 \
        CHECK(cublas_status == CUBLAS_STATUS_SUCCESS, "{}", cublasLtGetStatusString(cublas_status)); \
    } while (0)

namespace train70b::cuda {

cudaDataType_t cuda_type(DType dtype);

// Of all products: they run one after another, on the compute stream.
const Tensor& workspace();

// The largest power of two, up to 256, that divides the address: what an algorithm may assume about a pointer.
uint32_t alignment_of(const Tensor& x);

// A product's descriptors and the algorithm that cuBLASLt's heuristic chose for it, to be made once per shape. The
// descriptors are kept until the process ends.
struct CublasPlan {
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t first = nullptr, second = nullptr, result = nullptr;
    cublasLtMatmulAlgo_t algorithm{};
    size_t workspace = 0;
    // What the heuristic found, its first choice first. No vector: nvcc 13.0 fails at one of a struct without a name.
    std::array<cublasLtMatmulHeuristicResult_t, 8> found{};
    int count = 0;  // of them

    template <class Value>
    void set(cublasLtMatmulDescAttributes_t attribute, const Value& value) {
        CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value));
    }
};

// c = op(a) op(b) + beta c, all row-major. set_up: further attributes of the operation. A usage error where cuBLASLt
// has no algorithm; it ends with `advice`: what would work. rows: as if a had so many. most: algorithms, up to 8.
CublasPlan make_plan(const Tensor& c, const Tensor& a, const Tensor& b, Transpose transpose, const std::string& advice,
                     const std::function<void(CublasPlan&)>& set_up = {}, int64_t rows = 0, int most = 1);
void run(const CublasPlan& plan, Tensor& c, const Tensor& a, const Tensor& b, float beta);

}  // namespace train70b::cuda
