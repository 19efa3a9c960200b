// The matrix product through cuBLASLt. cuBLAS thinks in columns: a row-major (M, N) matrix is a column-major (N, M)
// one, so that c = op(a) op(b) is asked for as c^T = op(b)^T op(a)^T, with b first.
#include <cublasLt.h>

#include <map>
#include <tuple>

#include "01_single_gpu/cuda.cuh"

#define CUBLAS_CHECK(call)                                                                           \
    do {                                                                                             \
        const cublasStatus_t cublas_status = (call);                                                 \
        CHECK(cublas_status == CUBLAS_STATUS_SUCCESS, "{}", cublasLtGetStatusString(cublas_status)); \
    } while (0)

namespace train70b::cuda {
namespace {

cudaDataType_t cuda_type(DType dtype) { return dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F; }

// The largest power of two, up to 256, that divides the address: what an algorithm may assume about a pointer.
uint32_t alignment_of(const Tensor& x) {
    const auto address = reinterpret_cast<uintptr_t>(x.raw());
    uint32_t alignment = 256;
    while (address % alignment != 0) alignment /= 2;
    return alignment;
}

constexpr size_t kWorkspace = 32 << 20;  // what cuBLASLt recommends on Hopper

struct Handle {
    cublasLtHandle_t handle = nullptr;
    Tensor workspace{{int64_t(kWorkspace / 4)}, DType::f32, Device::cuda, Memory::workspace};
    Handle() { CUBLAS_CHECK(cublasLtCreate(&handle)); }
};
Handle& lt() {
    static Handle* instance = new Handle();
    return *instance;
}

// A product's descriptors and the algorithm that cuBLASLt's heuristic chose for it, made once per shape.
struct Plan {
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t first = nullptr, second = nullptr, result = nullptr;
    cublasLtMatmulAlgo_t algorithm{};
    size_t workspace = 0;
};
using Key = std::tuple<int64_t, int64_t, int64_t, Transpose, DType, DType, bool, uint32_t, uint32_t, uint32_t>;

cublasLtMatrixLayout_t layout(const Tensor& x) {  // row-major (rows, cols) = column-major (cols, rows)
    cublasLtMatrixLayout_t made = nullptr;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&made, cuda_type(x.dtype()), x.cols(), x.rows(), x.cols()));
    return made;
}

Plan make_plan(const Tensor& c, const Tensor& a, const Tensor& b, Transpose transpose) {
    Plan plan;
    // fp32 products stay fp32 (no TF32): "right to the last digit" comes first.
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    const cublasOperation_t first = transpose == Transpose::b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = transpose == Transpose::a ? CUBLAS_OP_T : CUBLAS_OP_N;
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
    plan.first = layout(b);
    plan.second = layout(a);
    plan.result = layout(c);

    cublasLtMatmulPreference_t preference = nullptr;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspace);
    // Parts of a sum over K are added in fp32, not in the dtype of c.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(b));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(a));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(c));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(c));
    cublasLtMatmulHeuristicResult_t found{};
    int count = 0;
    CUBLAS_CHECK(cublasLtMatmulAlgoGetHeuristic(lt().handle, plan.operation, plan.first, plan.second, plan.result,
                                                plan.result, preference, 1, &found, &count));
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    CHECK(count == 1, "cuBLASLt has no algorithm for a {} {} b {} {} c {} {}", name_of(a.dtype()), to_string(a.shape()),
          name_of(b.dtype()), to_string(b.shape()), name_of(c.dtype()), to_string(c.shape()));
    plan.algorithm = found.algo;
    plan.workspace = found.workspaceSize;
    return plan;
}

}  // namespace

void matmul_into(Tensor& c, const Tensor& a, const Tensor& b, Transpose transpose, float beta) {
    if (c.size() == 0) return;
    static std::map<Key, Plan> plans;
    const Key key{a.rows(),  a.cols(),  c.cols(),        transpose,       a.dtype(),
                  c.dtype(), beta != 0, alignment_of(a), alignment_of(b), alignment_of(c)};
    auto plan = plans.find(key);
    if (plan == plans.end()) plan = plans.emplace(key, make_plan(c, a, b, transpose)).first;
    const float alpha = 1;
    CUBLAS_CHECK(cublasLtMatmul(lt().handle, plan->second.operation, &alpha, b.raw(), plan->second.first, a.raw(),
                                plan->second.second, &beta, c.raw(), plan->second.result, c.raw(), plan->second.result,
                                &plan->second.algorithm, lt().workspace.raw(), plan->second.workspace, stream()));
}

}  // namespace train70b::cuda
