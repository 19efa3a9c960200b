// Matrix product with cuBLASLt. cuBLAS is column-major: a row-major (M, N) matrix is a column-major (N, M) one, so
// c = op(a) op(b) is computed as c^T = op(b)^T op(a)^T, with b as the first operand.
#include <bit>
#include <map>
#include <tuple>

#include "01_single_gpu/ops/cublas.cuh"
#include "01_single_gpu/ops/matmul_autotune.h"
#include "01_single_gpu/ops/matmul_own.h"

namespace train70b::cuda {

cudaDataType_t cuda_type(DType dtype) {
    switch (dtype) {
        case DType::f32: return CUDA_R_32F;
        case DType::bf16: return CUDA_R_16BF;
        case DType::e4m3: return CUDA_R_8F_E4M3;
        case DType::e5m2: return CUDA_R_8F_E5M2;
        default: CHECK(false, "no product of {}", name_of(dtype)); return CUDA_R_32F;
    }
}

namespace {

constexpr size_t kWorkspace = 32 << 20;  // what cuBLASLt recommends on Hopper

struct Handle {
    cublasLtHandle_t handle = nullptr;
    Tensor workspace{{int64_t(kWorkspace / 4)}, DType::f32, Device::cuda, Memory::workspace};
    Handle() { CUBLAS_CHECK(cublasLtCreate(&handle)); }
};
Handle& lt() {
    // Two streams would overwrite each other's part of the workspace; and its memory belongs to the stream on which it
    // was allocated.
    CHECK(!CudaStreamScope::active(), "products run on the compute stream only");
    static Handle* instance = new Handle();
    return *instance;
}

cublasLtMatrixLayout_t layout(const Tensor& x, int64_t rows) {  // row-major (rows, cols) = column-major (cols, rows)
    cublasLtMatrixLayout_t made = nullptr;
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&made, cuda_type(x.dtype()), x.cols(), rows, x.cols()));
    return made;
}

void set_layouts(CublasPlan& plan, const Tensor& c, const Tensor& a, const Tensor& b, Transpose transpose,
                 int64_t rows) {
    const bool summed = transpose == Transpose::a;  // the rows of a are those of b, else those of c
    plan.first = layout(b, summed ? rows : b.rows());
    plan.second = layout(a, rows);
    plan.result = layout(c, summed ? c.rows() : rows);
}

}  // namespace

const Tensor& workspace() { return lt().workspace; }

uint32_t alignment_of(const Tensor& x) {
    return 1u << std::min(std::countr_zero(reinterpret_cast<uintptr_t>(x.raw())), 8);
}

CublasPlan make_plan(const Tensor& c, const Tensor& a, const Tensor& b, Transpose transpose, const std::string& advice,
                     const std::function<void(CublasPlan&)>& set_up, int64_t rows, int most) {
    CublasPlan plan;
    // fp32 products stay fp32 (no TF32): "right to the last digit" comes first.
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    plan.set(CUBLASLT_MATMUL_DESC_TRANSA, transpose == Transpose::b ? CUBLAS_OP_T : CUBLAS_OP_N);
    plan.set(CUBLASLT_MATMUL_DESC_TRANSB, transpose == Transpose::a ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (set_up) set_up(plan);
    set_layouts(plan, c, a, b, transpose, rows > 0 ? rows : a.rows());

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
    const cublasStatus_t status =
        cublasLtMatmulAlgoGetHeuristic(lt().handle, plan.operation, plan.first, plan.second, plan.result, plan.result,
                                       preference, most, plan.found.data(), &plan.count);
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) CUBLAS_CHECK(status);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || plan.count == 0) {
        const auto text = [](const Tensor& x, bool transposed) {
            return describe("{} {}{}", name_of(x.dtype()), to_string(x.shape()), transposed ? "^T" : "");
        };
        usage_error("cuBLASLt has no algorithm for the product {} = {} x {} on this GPU: {}", text(c, false),
                    text(a, transpose == Transpose::a), text(b, transpose == Transpose::b), advice);
    }
    plan.algorithm = plan.found[0].algo;
    plan.workspace = plan.found[0].workspaceSize;
    return plan;
}

void run(const CublasPlan& plan, Tensor& c, const Tensor& a, const Tensor& b, float beta) {
    const float alpha = 1;
    CUBLAS_CHECK(cublasLtMatmul(lt().handle, plan.operation, &alpha, b.raw(), plan.first, a.raw(), plan.second, &beta,
                                c.raw(), plan.result, c.raw(), plan.result, &plan.algorithm, lt().workspace.raw(),
                                plan.workspace, stream()));
}

namespace {
using Key =
    std::tuple<int64_t, int64_t, int64_t, Transpose, DType, DType, bool, uint32_t, uint32_t, uint32_t, std::string>;
auto& plans = *new std::map<Key, CublasPlan>;  // until the process ends, as lt()

// Whether cuBLASLt takes the plan's algorithm for its product, in which case its workspace is known.
bool takes_algorithm(CublasPlan& plan) {
    cublasLtMatmulHeuristicResult_t checked{};
    const bool takes = cublasLtMatmulAlgoCheck(lt().handle, plan.operation, plan.first, plan.second, plan.result,
                                               plan.result, &plan.algorithm, &checked) == CUBLAS_STATUS_SUCCESS;
    plan.workspace = checked.workspaceSize;
    return takes && checked.workspaceSize <= kWorkspace;
}

// Of the algorithms that the heuristic found the fastest, by the best of five calls, timed in turn. c stays as it is.
cublasLtMatmulAlgo_t fastest(CublasPlan plan, Tensor& c, const Tensor& a, const Tensor& b, float beta) {
    std::vector<char> before(beta != 0 ? size_t(c.bytes()) : 0);  // on the host: a gradient can have gigabytes
    if (beta != 0) cuda_copy(before.data(), c.raw(), c.bytes(), CopyKind::to_host);
    std::vector<double> seconds(size_t(plan.count), HUGE_VAL);
    for (int round = 0; round < 6; ++round)
        for (size_t i = 0; i < seconds.size(); ++i) {
            plan.algorithm = plan.found[i].algo;
            plan.workspace = plan.found[i].workspaceSize;
            CudaTimer timer;
            run(plan, c, a, b, beta);
            timer.stop();
            const double taken = timer.seconds();  // waits, in the warm-up, too
            if (round > 0) seconds[i] = std::min(seconds[i], taken);
        }
    if (beta != 0) cuda_copy(c.raw(), before.data(), c.bytes(), CopyKind::to_device);
    return plan.found[size_t(std::min_element(seconds.begin(), seconds.end()) - seconds.begin())].algo;
}

// Gives the plan the algorithm of its product in the file of --matmul-autotune, to which it first adds the fastest if
// there is none.
void tune(CublasPlan& plan, Tensor& c, const Tensor& a, const Tensor& b, Transpose transpose, float beta) {
    const auto text = [](const Tensor& x, bool transposed = false) {
        return describe("{} {} x {}{}, aligned to {}", name_of(x.dtype()), x.rows(), x.cols(), transposed ? "^T" : "",
                        alignment_of(x));
    };
    const std::string product = describe("{} {} ({}) ({})", text(c), beta != 0 ? "+=" : "=",
                                         text(a, transpose == Transpose::a), text(b, transpose == Transpose::b));
    std::optional<AlgorithmWords> words = tuned_algorithm(product);
    if (!words) {
        add_tuned_algorithm(product, std::bit_cast<AlgorithmWords>(fastest(plan, c, a, b, beta)));
        words = tuned_algorithm(product);  // another rank's, if that came first
    }
    CublasPlan tuned = plan;
    tuned.algorithm = std::bit_cast<cublasLtMatmulAlgo_t>(words.value());
    if (takes_algorithm(tuned))
        plan = tuned;
    else
        warn_of_tuned_algorithm(product);
}

const CublasPlan& plan_of(Tensor& c, const Tensor& a, const Tensor& b, Transpose transpose, float beta, int64_t rows,
                          const std::string& tuned_by) {
    const Key key{rows,      a.cols(),        c.cols(),        transpose,       a.dtype(), c.dtype(),
                  beta != 0, alignment_of(a), alignment_of(b), alignment_of(c), tuned_by};
    auto plan = plans.find(key);
    if (plan == plans.end()) {
        CublasPlan made =
            make_plan(c, a, b, transpose, "try sizes that are divisible by 16", {}, rows, tuned_by.empty() ? 1 : 8);
        if (!tuned_by.empty()) tune(made, c, a, b, transpose, beta);
        plan = plans.emplace(key, made).first;
    }
    return plan->second;
}

// The next of eight numbers per power of two.
int64_t rounded_up(int64_t rows) {
    const int64_t step = std::max<int64_t>(int64_t(std::bit_floor(uint64_t(rows))) / 8, 1);
    return (rows + step - 1) / step * step;
}

// The algorithm that was chosen for the next rounded number of rows, with these rows; false where it does not take
// them.
bool run_rounded(Tensor& c, const Tensor& a, const Tensor& b, Transpose transpose, float beta) {
    CublasPlan plan = plan_of(c, a, b, transpose, beta, rounded_up(a.rows()), "");
    set_layouts(plan, c, a, b, transpose, a.rows());
    const bool fits = takes_algorithm(plan);
    if (fits) run(plan, c, a, b, beta);
    for (cublasLtMatrixLayout_t made : {plan.first, plan.second, plan.result})
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(made));
    return fits;
}
}  // namespace

int64_t matmul_algorithms() { return int64_t(plans.size()); }

void matmul_into(Tensor& c, const Tensor& a, const Tensor& b, Transpose transpose, float beta, Rows rows) {
    if (matmul_by != MatmulBy::cublaslt) return own_matmul(c, a, b, transpose, beta);
    const bool rounded = rows == Rows::vary && rounded_up(a.rows()) != a.rows();
    if (rounded && run_rounded(c, a, b, transpose, beta)) return;
    // Where rows vary, the calls before would decide which products are timed.
    run(plan_of(c, a, b, transpose, beta, a.rows(), rows == Rows::vary ? "" : matmul_autotune), c, a, b, beta);
}

}  // namespace train70b::cuda
