// cuBLAS on the emulated GPU: of it only cublasGemmGroupedBatchedEx, products of several shapes in one call. Sizes and
// scale factors are the host's, pointers to matrices are in the device's memory, where the call finds them when its
// turn in the stream has come.
#include <cublas_v2.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "products.h"

using namespace emulate;

struct cublasContext {
    cudaStream_t stream = nullptr;
    void* workspace = nullptr;
    size_t bytes = 0;
};

namespace {

constexpr size_t kUsed = 64 << 10;  // of a workspace

cublasStatus_t fail(cublasStatus_t status, const std::string& why) { return refuse("cuBLAS: " + why), status; }

struct Group {
    Product product;
    float alpha, beta;
    int64_t size;
};

const char* reason_against_group(const Product& p) {
    for (const Layout& each : p.x)
        if (each.type != p.x[A].type || each.fp8()) return "matrices of different types, or of FP8";
    return reason_against(p);
}

// All products, with the pointers that are in memory now. They may run at once: no two have the same result.
void run(const std::vector<Group>& groups, const std::array<const void* const*, 3>& arrays) {
    size_t at = 0;
    std::vector<std::pair<const void*, size_t>> results;
    for (const Group& group : groups)
        for (int64_t i = 0; i < group.size; ++i, ++at) {
            const auto [a, b, c] = std::array{arrays[A][at], arrays[B][at], arrays[C][at]};
            const Data data{{a, b, c}, const_cast<void*>(c), {}, group.alpha, group.beta};
            const auto wrong = [&](const char* what) {
                fault("cublasGemmGroupedBatchedEx: product " + std::to_string(at) + ": " + what + " (" +
                      to_string(group.product) + ")");
            };
            const auto& x = group.product.x;
            for (size_t m = A; m <= C; ++m)
                if (!fits(data.in[m], x[m].bytes(), 16))
                    wrong("a matrix is not aligned to 16 bytes, or not in one allocation of the device");
            for (size_t m = A; m <= B; ++m)
                if (overlap(c, x[C].bytes(), data.in[m], x[m].bytes())) wrong("C overlaps A or B");
            for (const auto& [other, bytes] : results)
                if (overlap(c, x[C].bytes(), other, bytes)) wrong("C overlaps that of another product");
            results.emplace_back(c, x[C].bytes());
            multiply(group.product, data);
        }
}

}  // namespace

extern "C" {

cublasStatus_t cublasCreate_v2(cublasHandle_t* made) { return *made = new cublasContext, CUBLAS_STATUS_SUCCESS; }
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    return *handle = {stream}, CUBLAS_STATUS_SUCCESS;  // and back to a workspace of its own
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void* workspace, size_t bytes) {
    if (!fits(workspace, bytes, 256))
        return fail(CUBLAS_STATUS_INVALID_VALUE,
                    "a workspace that is not aligned to 256 bytes, or not in one allocation of the device");
    handle->workspace = workspace, handle->bytes = bytes;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasGemmGroupedBatchedEx_64(cublasHandle_t handle, const cublasOperation_t transa[],
                                             const cublasOperation_t transb[], const int64_t m[], const int64_t n[],
                                             const int64_t k[], const void* alpha, const void* const a[],
                                             cudaDataType_t a_type, const int64_t lda[], const void* const b[],
                                             cudaDataType_t b_type, const int64_t ldb[], const void* beta,
                                             void* const c[], cudaDataType_t c_type, const int64_t ldc[], int64_t count,
                                             const int64_t sizes[], cublasComputeType_t compute) {
    std::vector<Group> groups;
    size_t products = 0;
    for (int64_t g = 0; g < count; ++g) {
        const bool ta = transa[g] != CUBLAS_OP_N, tb = transb[g] != CUBLAS_OP_N;
        const Layout of_c{c_type, m[g], n[g], ldc[g]};
        const Product product{{compute, CUDA_R_32F, transa[g], transb[g]},
                              {Layout{a_type, ta ? k[g] : m[g], ta ? m[g] : k[g], lda[g]},
                               Layout{b_type, tb ? n[g] : k[g], tb ? k[g] : n[g], ldb[g]}, of_c, of_c}};
        if (const char* why = reason_against_group(product))
            return fail(CUBLAS_STATUS_NOT_SUPPORTED, std::string(why) + " (" + to_string(product) + ")");
        groups.push_back({product, static_cast<const float*>(alpha)[g], static_cast<const float*>(beta)[g], sizes[g]});
        products += size_t(sizes[g]);
    }
    const std::array<const void* const*, 3> arrays{a, b, c};
    for (const void* const* each : arrays)
        if (!fits(each, products * sizeof(void*), sizeof(void*)))
            return fail(CUBLAS_STATUS_INVALID_VALUE, "pointers to matrices are not in one allocation of the device");
    if (!handle->workspace)
        return fail(CUBLAS_STATUS_INVALID_VALUE, "no workspace is set: of its own the emulator lacks");
    for (const void* const* each : arrays)
        if (overlap(each, products * sizeof(void*), handle->workspace, handle->bytes))
            return fail(CUBLAS_STATUS_INVALID_VALUE, "the workspace overlaps the pointers to matrices");
    enqueue(handle->stream, "cublasGemmGroupedBatchedEx",
            [groups, arrays, workspace = handle->workspace, bytes = std::min(handle->bytes, kUsed)] {
                std::memset(workspace, 0xff, bytes);  // what it held is lost
                run(groups, arrays);
                return true;
            });
    return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
