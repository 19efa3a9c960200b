// cuBLASLt on the emulated GPU: D = alpha op(A) op(B) + beta C by definition, all matrices column-major. Of what its
// documentation ("cublasLtMatmul()") supports on Hopper, it has what the project uses; it refuses the rest.
#include <cblas.h>
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <vector>

#include "emulate.h"

namespace emulate {
namespace {

using ScaleMode = cublasLtMatmulMatrixScale_t;
constexpr ScaleMode kTensor = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
constexpr ScaleMode kOuter = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
constexpr ScaleMode kVec128 = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
constexpr ScaleMode kBlock128 = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
constexpr int64_t kBlock = 128;            // terms of the sum that share a scale in the last two modes
constexpr size_t kWorkspace = 64 << 10;    // what an algorithm uses if it may have as much
constexpr uint64_t kMagic = 0x656d756c61;  // marks an algorithm that the heuristic returned

enum { A, B, C, D };

struct Operation {
    cublasComputeType_t compute;
    cudaDataType_t scale;
    cublasOperation_t transa = CUBLAS_OP_N, transb = CUBLAS_OP_N;
    std::array<ScaleMode, 2> modes = {kTensor, kTensor};
    bool operator==(const Operation&) const = default;
};
struct Description {
    Operation operation;
    std::array<const void*, 2> scales{};  // may change from product to product
};
struct Layout {
    cudaDataType_t type;
    int64_t rows, cols, ld;
    bool operator==(const Layout&) const = default;

    bool fp8() const { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
    int64_t element() const { return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF ? 2 : 1; }
    size_t bytes() const { return size_t(((cols - 1) * ld + rows) * element()); }
};
struct Preference {
    uint64_t workspace = 0;
    uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_MASK;  // of no effect: there are no parts to add
    std::array<uint32_t, 4> alignment = {256, 256, 256, 256};
};

// A product without its data: what the heuristic is asked for, and what its algorithm is good for.
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
struct Algorithm {
    Product product;
    std::array<uint32_t, 4> alignment;
    size_t workspace;
};
std::mutex algorithms_mutex;
std::vector<Algorithm> algorithms;                // a cublasLtMatmulAlgo_t holds an index
std::vector<std::pair<size_t, Product>> checked;  // products that an algorithm takes beside its own

struct Data {
    std::array<const void*, 3> in;
    void* out;
    std::array<const void*, 2> scales;
    float alpha, beta;

    const void* matrix(size_t i) const { return i == D ? out : in[i]; }
};

const char* name_of(cudaDataType_t type) {
    switch (type) {
        case CUDA_R_32F: return "fp32";
        case CUDA_R_16BF: return "bf16";
        case CUDA_R_8F_E4M3: return "e4m3";
        case CUDA_R_8F_E5M2: return "e5m2";
        default: return nullptr;
    }
}
cublasStatus_t fail(cublasStatus_t status, const std::string& why) { return refuse("cuBLASLt: " + why), status; }
cublasStatus_t fail(cublasStatus_t status, const std::string& why, const Product& p) {
    std::string what = why + " (m " + std::to_string(p.m()) + ", n " + std::to_string(p.n()) + ", k " +
                       std::to_string(p.k()) + (p.ta() ? ", A^T" : ", A") + (p.tb() ? " B^T" : " B") + ", types";
    for (const Layout& each : p.x) what += std::string(" ") + (name_of(each.type) ? name_of(each.type) : "unknown");
    return fail(status, what + ")");
}

// Why there is no algorithm, or nullptr.
const char* reason_against_fp8(const Product& p) {
    if (!p.x[A].fp8() || !p.x[B].fp8()) return "only one of A and B is FP8";
    if (p.x[A].type == CUDA_R_8F_E5M2 && p.x[B].type == CUDA_R_8F_E5M2) return "A and B are both e5m2";
    if (p.x[C].fp8()) return "a result in FP8, which the emulator lacks";
    if (!p.ta() || p.tb()) return "Hopper multiplies FP8 only with A transposed and B not";
    if (p.m() % 16 != 0 || p.n() % 16 != 0 || p.k() % 16 != 0) return "FP8: m, n and k must be multiples of 16";
    for (const Layout& each : p.x)
        if (each.ld * each.element() % 16 != 0) return "FP8: leading dimensions must be multiples of 16 bytes";
    using Modes = std::array<ScaleMode, 2>;
    for (const Modes& each :
         {Modes{kTensor, kTensor}, {kOuter, kOuter}, {kVec128, kVec128}, {kVec128, kBlock128}, {kBlock128, kVec128}})
        if (p.operation.modes == each) return nullptr;
    return "scale modes of A and B that do not go together";
}
const char* reason_against(const Product& p) {
    for (const Layout& each : p.x) {
        if (!name_of(each.type)) return "a type that the emulator lacks";
        if (each.rows < 1 || each.cols < 1) return "a dimension is 0";
        if (each.ld < each.rows) return "a leading dimension is less than the number of rows";
    }
    if (p.operation.compute != CUBLAS_COMPUTE_32F || p.operation.scale != CUDA_R_32F)
        return "a compute type or scale type that the emulator lacks";
    if ((p.tb() ? p.x[B].cols : p.x[B].rows) != p.k()) return "A and B differ in k";
    for (const Layout& each : {p.x[C], p.x[D]})
        if (each.rows != p.m() || each.cols != p.n()) return "C or D is not (m, n)";
    if (p.x[C].type != p.x[D].type) return "C and D of different types";
    if (p.x[A].fp8() || p.x[B].fp8()) return reason_against_fp8(p);
    if (p.operation.modes != Operation{}.modes) return "scale modes without FP8";
    if (p.x[A].type != p.x[B].type) return "A and B of different types";
    return p.x[C].type == p.x[A].type || p.x[C].type == CUDA_R_32F ? nullptr : "C of a type that A and B do not allow";
}

// ---- scales: of `rows` rows of op(A) or columns of op(B), by k terms ------------------------------------------------

int64_t blocks(int64_t n) { return (n + kBlock - 1) / kBlock; }
int64_t padded_blocks(int64_t k) { return (blocks(k) + 3) / 4 * 4; }  // in a row of 128 x 128 blocks
size_t scale_bytes(ScaleMode mode, int64_t rows, int64_t k) {
    const int64_t count = mode == kTensor   ? 1
                          : mode == kOuter  ? rows
                          : mode == kVec128 ? rows * blocks(k)
                                            : blocks(rows) * padded_blocks(k);
    return sizeof(float) * size_t(count);
}
// For each row, the scale of its terms in a block.
std::vector<float> scales_of(const void* scales, ScaleMode mode, int64_t rows, int64_t k, int64_t block) {
    std::vector<float> result(size_t(rows), 1);
    const float* from = static_cast<const float*>(scales);
    for (int64_t row = 0; scales && row < rows; ++row)
        result[size_t(row)] = from[mode == kTensor   ? 0
                                   : mode == kOuter  ? row
                                   : mode == kVec128 ? block * rows + row
                                                     : row / kBlock * padded_blocks(k) + block];
    return result;
}

// ---- the product ----------------------------------------------------------------------------------------------------

std::array<float, 256> fp8_values(__nv_fp8_interpretation_t format) {
    std::array<float, 256> values;
    for (size_t i = 0; i < 256; ++i)
        values[i] = __half2float(__half(__nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t(i), format)));
    return values;
}
// The matrix in fp32, its columns without gaps.
std::vector<float> to_fp32(const void* data, const Layout& x) {
    static const std::array<float, 256> e4m3 = fp8_values(__NV_E4M3), e5m2 = fp8_values(__NV_E5M2);
    const auto& values = x.type == CUDA_R_8F_E4M3 ? e4m3 : e5m2;
    std::vector<float> wide(size_t(x.rows * x.cols));
    for (int64_t col = 0; col < x.cols; ++col)
        for (int64_t row = 0, from = col * x.ld; row < x.rows; ++row, ++from)
            wide[size_t(col * x.rows + row)] = x.type == CUDA_R_32F ? static_cast<const float*>(data)[from]
                                               : x.type == CUDA_R_16BF
                                                   ? __bfloat162float(static_cast<const __nv_bfloat16*>(data)[from])
                                                   : values[static_cast<const uint8_t*>(data)[from]];
    return wide;
}

void multiply(const Product& p, const Data& data) {
    const int64_t m = p.m(), n = p.n(), k = p.k();
    const std::vector<float> a = to_fp32(data.in[A], p.x[A]), b = to_fp32(data.in[B], p.x[B]);
    std::vector<float> sum(size_t(m * n)), part(size_t(m * n));
    const auto [a_mode, b_mode] = p.operation.modes;
    const int64_t step = a_mode == kTensor || a_mode == kOuter ? k : kBlock;  // terms with the same scales
    for (int64_t first = 0; first < k; first += step) {
        cblas_sgemm(CblasColMajor, p.ta() ? CblasTrans : CblasNoTrans, p.tb() ? CblasTrans : CblasNoTrans, int(m),
                    int(n), int(std::min(step, k - first)), 1, a.data() + first * (p.ta() ? 1 : m), int(p.x[A].rows),
                    b.data() + first * (p.tb() ? n : 1), int(p.x[B].rows), 0, part.data(), int(m));
        const std::vector<float> a_scale = scales_of(data.scales[A], a_mode, m, k, first / kBlock),
                                 b_scale = scales_of(data.scales[B], b_mode, n, k, first / kBlock);
        for (size_t j = 0, at = 0; j < size_t(n); ++j)
            for (size_t i = 0; i < size_t(m); ++i, ++at) sum[at] += part[at] * a_scale[i] * b_scale[j];
    }
    if (data.beta != 0) part = to_fp32(data.in[C], p.x[C]);  // else C is not read
    for (int64_t j = 0, at = 0; j < n; ++j)
        for (int64_t i = 0; i < m; ++i, ++at) {
            const float added = data.beta != 0 ? data.beta * part[size_t(at)] : 0;
            const float value = data.alpha * sum[size_t(at)] + added;
            if (p.x[D].type == CUDA_R_32F)
                static_cast<float*>(data.out)[j * p.x[D].ld + i] = value;
            else
                static_cast<__nv_bfloat16*>(data.out)[j * p.x[D].ld + i] = __float2bfloat16_rn(value);
        }
}

bool overlap(const void* p, size_t p_bytes, const void* q, size_t q_bytes) {
    const auto a = reinterpret_cast<uintptr_t>(p), b = reinterpret_cast<uintptr_t>(q);
    return p_bytes > 0 && q_bytes > 0 && a < b + q_bytes && b < a + p_bytes;
}
bool fits(const void* p, size_t bytes, uint32_t alignment) {
    return reinterpret_cast<uintptr_t>(p) % alignment == 0 && on_device(p, bytes);
}

// Why the algorithm cannot run with these data, or nullptr.
const char* reason_against(const Algorithm& algorithm, const Product& p, const Data& data, const void* workspace,
                           size_t given) {
    const size_t used = algorithm.workspace, out = p.x[D].bytes();
    if (given < used || (used > 0 && !fits(workspace, given, 256)))
        return "the workspace is too small, not aligned to 256 bytes or not in one allocation of the device";
    for (size_t i = A; i <= D; ++i) {
        if (!fits(data.matrix(i), p.x[i].bytes(), algorithm.alignment[i]))
            return "a matrix is less aligned than the heuristic was told, or not in one allocation of the device";
        if (i <= B && overlap(data.out, out, data.matrix(i), p.x[i].bytes())) return "D overlaps A or B";
        if (overlap(workspace, used, data.matrix(i), p.x[i].bytes())) return "the workspace overlaps a matrix";
    }
    const bool in_place = data.in[C] == data.out && p.x[C] == p.x[D];
    if (!in_place && overlap(data.in[C], p.x[C].bytes(), data.out, out)) return "C and D overlap, but differ";
    for (size_t i = A; i <= B; ++i) {
        const size_t bytes = scale_bytes(p.operation.modes[i], i == A ? p.m() : p.n(), p.k());
        const void* scales = data.scales[i];
        if (!scales && p.operation.modes[i] == kTensor) continue;  // means 1
        if (!scales || !p.x[i].fp8())
            return "scales of a matrix that is not FP8, or no scales though the mode has many";
        if (!fits(scales, bytes, 16))
            return "scales are not aligned to 16 bytes or not in one allocation of the device";
        if (overlap(scales, bytes, data.out, out) || overlap(scales, bytes, workspace, used))
            return "scales overlap D or the workspace";
    }
    return nullptr;
}

// cuBLASLt's descriptors are pointers to what only cuBLASLt looks into.
Description& see(cublasLtMatmulDesc_t x) { return *reinterpret_cast<Description*>(x); }
Layout& see(cublasLtMatrixLayout_t x) { return *reinterpret_cast<Layout*>(x); }
Preference& see(cublasLtMatmulPreference_t x) { return *reinterpret_cast<Preference*>(x); }
template <class Descriptor, class T>
cublasStatus_t create(Descriptor* made, const T& value) {
    return *made = reinterpret_cast<Descriptor>(new T(value)), CUBLAS_STATUS_SUCCESS;
}
template <class Descriptor>
cublasStatus_t destroy(Descriptor x) {
    return delete &see(x), CUBLAS_STATUS_SUCCESS;
}
template <class T>
cublasStatus_t set(T& to, const void* from, size_t bytes) {
    if (!from || bytes != sizeof to) return fail(CUBLAS_STATUS_INVALID_VALUE, "an attribute of a wrong size");
    return std::memcpy(&to, from, bytes), CUBLAS_STATUS_SUCCESS;
}

}  // namespace
}  // namespace emulate

using namespace emulate;

extern "C" {

const char* cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS: return "success";
        case CUBLAS_STATUS_NOT_SUPPORTED: return "the functionality requested is not supported";
        default: return "an unsupported value or parameter was passed to the function";
    }
}
cublasStatus_t cublasLtCreate(cublasLtHandle_t* made) {
    static int only;  // a handle has no state here
    return *made = reinterpret_cast<cublasLtHandle_t>(&only), CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t) { return CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t compute, cudaDataType_t scale) {
    return create(made, Description{.operation = {compute, scale}});
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t x) { return destroy(x); }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t x, cublasLtMatmulDescAttributes_t attribute,
                                              const void* from, size_t bytes) {
    switch (Operation& operation = see(x).operation; attribute) {
        case CUBLASLT_MATMUL_DESC_TRANSA: return set(operation.transa, from, bytes);
        case CUBLASLT_MATMUL_DESC_TRANSB: return set(operation.transb, from, bytes);
        case CUBLASLT_MATMUL_DESC_A_SCALE_MODE: return set(operation.modes[A], from, bytes);
        case CUBLASLT_MATMUL_DESC_B_SCALE_MODE: return set(operation.modes[B], from, bytes);
        case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return set(see(x).scales[A], from, bytes);
        case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return set(see(x).scales[B], from, bytes);
        default: return fail(CUBLAS_STATUS_INVALID_VALUE, "an attribute of an operation that the emulator lacks");
    }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType type, uint64_t rows, uint64_t cols,
                                          int64_t ld) {
    return create(made, Layout{type, int64_t(rows), int64_t(cols), ld});
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t x) { return destroy(x); }

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) { return create(made, Preference()); }
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t x) { return destroy(x); }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t x,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* from,
                                                    size_t bytes) {
    switch (attribute) {
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return set(see(x).workspace, from, bytes);
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return set(see(x).reduction, from, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return set(see(x).alignment[A], from, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return set(see(x).alignment[B], from, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return set(see(x).alignment[C], from, bytes);
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return set(see(x).alignment[D], from, bytes);
        default: return fail(CUBLAS_STATUS_INVALID_VALUE, "a preference that the emulator lacks");
    }
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preferred, int wanted,
                                              cublasLtMatmulHeuristicResult_t* found, int* count) {
    *count = 0;
    if (wanted < 1) return fail(CUBLAS_STATUS_INVALID_VALUE, "no algorithm is asked for");
    const Product product{see(operation).operation, {see(a), see(b), see(c), see(d)}};
    if (const char* why = reason_against(product)) return fail(CUBLAS_STATUS_NOT_SUPPORTED, why, product);
    const auto [workspace, reduction, alignment] = see(preferred);
    for (size_t i = A; i <= D; ++i)
        if (alignment[i] < (product.x[A].fp8() ? 16 : product.x[i].element()))
            return fail(CUBLAS_STATUS_NOT_SUPPORTED, "less alignment than an element's, for FP8 16 bytes", product);

    const std::lock_guard lock(algorithms_mutex);
    *found = {};
    found->algo = {{kMagic, algorithms.size()}};
    found->workspaceSize = std::min<size_t>(workspace, kWorkspace);
    algorithms.push_back({product, alignment, found->workspaceSize});
    *count = 1;
    return CUBLAS_STATUS_SUCCESS;
}

// Whether an algorithm takes another product, which then runs with it: here one that differs in n or k only, of eight or
// more of each.
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* chosen, cublasLtMatmulHeuristicResult_t* result) {
    const Product product{see(operation).operation, {see(a), see(b), see(c), see(d)}};
    if (const char* why = reason_against(product)) return fail(CUBLAS_STATUS_NOT_SUPPORTED, why, product);
    const std::lock_guard lock(algorithms_mutex);
    if (!chosen || chosen->data[0] != kMagic || chosen->data[1] >= algorithms.size())
        return fail(CUBLAS_STATUS_INVALID_VALUE, "no algorithm of the heuristic's", product);
    const Algorithm& algorithm = algorithms[chosen->data[1]];
    const Product& own = algorithm.product;
    bool takes = product.operation == own.operation && product.m() == own.m() && product.n() >= 8 && product.k() >= 8;
    for (size_t i = A; i <= D; ++i) takes = takes && product.x[i].type == own.x[i].type;
    if (!takes) return CUBLAS_STATUS_NOT_SUPPORTED;
    const std::pair entry(size_t(chosen->data[1]), product);
    if (std::find(checked.begin(), checked.end(), entry) == checked.end()) checked.push_back(entry);
    *result = {};
    result->algo = *chosen;
    result->workspaceSize = algorithm.workspace;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t operation, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* chosen, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
    const Product product{see(operation).operation, {see(a_layout), see(b_layout), see(c_layout), see(d_layout)}};
    if (const char* why = reason_against(product)) return fail(CUBLAS_STATUS_NOT_SUPPORTED, why, product);
    std::unique_lock lock(algorithms_mutex);
    if (!chosen || chosen->data[0] != kMagic || chosen->data[1] >= algorithms.size())
        return fail(CUBLAS_STATUS_INVALID_VALUE, "no algorithm of the heuristic's", product);
    const Algorithm algorithm = algorithms[chosen->data[1]];
    const bool other = algorithm.product != product;
    if (other &&
        std::find(checked.begin(), checked.end(), std::pair(size_t(chosen->data[1]), product)) == checked.end())
        return fail(CUBLAS_STATUS_INVALID_VALUE, "the heuristic's algorithm is for another product", product);
    lock.unlock();
    const Data data{
        {a, b, c}, d, see(operation).scales, *static_cast<const float*>(alpha), *static_cast<const float*>(beta)};
    if (const char* why = reason_against(algorithm, product, data, workspace, workspace_bytes))
        return fail(CUBLAS_STATUS_INVALID_VALUE, why, product);
    enqueue(stream, "cublasLtMatmul", [=] {
        if (algorithm.workspace > 0) std::memset(workspace, 0xff, algorithm.workspace);  // what it held is lost
        multiply(product, data);
        return true;
    });
    return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
