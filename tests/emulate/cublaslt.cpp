// cuBLASLt on the emulated GPU: descriptors, algorithms, and what it refuses of a call.
#include <cublasLt.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "products.h"

namespace emulate {
namespace {

constexpr size_t kWorkspace = 64 << 10;    // what an algorithm uses if it may have as much
constexpr uint64_t kMagic = 0x656d756c61;  // marks an algorithm that the heuristic returned
constexpr int64_t kAlgorithms = 5;         // of each product: sums in one part, in two, ...

struct Description {
    Operation operation;
    std::array<const void*, 2> scales{};  // may change from product to product
};
struct Preference {
    uint64_t workspace = 0;
    uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_MASK;  // of no effect: there are no parts to add
    std::array<uint32_t, 4> alignment = {256, 256, 256, 256};
};

// What a cublasLtMatmulAlgo_t holds. A process may store it, and another one restore it.
struct Algorithm {
    uint64_t magic, kind, product, workspace;  // kind: of operation and types
    int64_t parts, m;
    std::array<uint32_t, 4> alignment;
    bool operator==(const Algorithm&) const = default;
};
std::mutex checked_mutex;
std::vector<std::pair<Algorithm, Product>> checked;  // products that an algorithm takes beside its own
std::atomic<int64_t> fast_parts = 0;                 // emulated_fast_algorithm

uint64_t mixed(std::initializer_list<int64_t> numbers) {
    uint64_t sum = kMagic;
    for (int64_t each : numbers) sum = (sum ^ uint64_t(each)) * 0x9e3779b97f4a7c15u, sum ^= sum >> 29;
    return sum;
}
uint64_t kind_of(const Product& p) {
    const auto& [compute, scale, transa, transb, modes] = p.operation;
    return mixed({compute, scale, transa, transb, modes[A], modes[B], p.x[A].type, p.x[B].type, p.x[C].type});
}
uint64_t number_of(const Product& p) {
    return mixed({int64_t(kind_of(p)), p.m(), p.n(), p.k(), p.x[A].ld, p.x[B].ld, p.x[C].ld, p.x[D].ld});
}

cublasStatus_t fail(cublasStatus_t status, const std::string& why) { return refuse("cuBLASLt: " + why), status; }
cublasStatus_t fail(cublasStatus_t status, const std::string& why, const Product& p) {
    return fail(status, why + " (" + to_string(p) + ")");
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

    for (; *count < std::min<int64_t>(wanted, kAlgorithms); ++*count, ++found) {
        *found = {};
        found->workspaceSize = std::min<size_t>(workspace, kWorkspace);
        found->algo = std::bit_cast<cublasLtMatmulAlgo_t>(Algorithm{
            kMagic, kind_of(product), number_of(product), found->workspaceSize, *count + 1, product.m(), alignment});
    }
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion() { return CUBLAS_VERSION; }

// Whether an algorithm takes a product, which then runs with it: its own, and here one that differs in n or k only, of
// eight or more of each.
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t operation, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* chosen, cublasLtMatmulHeuristicResult_t* result) {
    const Product product{see(operation).operation, {see(a), see(b), see(c), see(d)}};
    if (const char* why = reason_against(product)) return fail(CUBLAS_STATUS_NOT_SUPPORTED, why, product);
    const auto algorithm = chosen ? std::bit_cast<Algorithm>(*chosen) : Algorithm{};
    if (algorithm.magic != kMagic) return fail(CUBLAS_STATUS_INVALID_VALUE, "no algorithm of the heuristic's", product);
    const bool similar = kind_of(product) == algorithm.kind && product.m() == algorithm.m;
    if (number_of(product) != algorithm.product && !(similar && product.n() >= 8 && product.k() >= 8))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    const std::lock_guard lock(checked_mutex);
    const std::pair entry(algorithm, product);
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
    std::unique_lock lock(checked_mutex);
    const auto algorithm = chosen ? std::bit_cast<Algorithm>(*chosen) : Algorithm{};
    if (algorithm.magic != kMagic) return fail(CUBLAS_STATUS_INVALID_VALUE, "no algorithm of the heuristic's", product);
    if (algorithm.product != number_of(product) &&
        std::find(checked.begin(), checked.end(), std::pair(algorithm, product)) == checked.end())
        return fail(CUBLAS_STATUS_INVALID_VALUE, "the heuristic's algorithm is for another product", product);
    lock.unlock();
    const Data data{
        {a, b, c}, d, see(operation).scales, *static_cast<const float*>(alpha), *static_cast<const float*>(beta)};
    if (const char* why = reason_against(algorithm, product, data, workspace, workspace_bytes))
        return fail(CUBLAS_STATUS_INVALID_VALUE, why, product);
    enqueue(stream, "cublasLtMatmul", [=] {
        if (algorithm.workspace > 0) std::memset(workspace, 0xff, algorithm.workspace);  // what it held is lost
        multiply(product, data, algorithm.parts);
        if (const int64_t fast = fast_parts; fast > 0 && algorithm.parts != fast)
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        return true;
    });
    return CUBLAS_STATUS_SUCCESS;
}

// For tests (support.h): from here on the heuristic's n-th algorithm, from 1, is the fastest by 2 ms. 0: none is.
void emulated_fast_algorithm(int n) { fast_parts = n; }

}  // extern "C"
