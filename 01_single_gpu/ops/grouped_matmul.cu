// Products of groups of rows by cuBLAS's grouped call, with one matrix product for each group. As in matmul.cu,
// c = a op(w) is computed as c^T = op(w)^T a^T, column-major.
#include <cublas_v2.h>

#include "01_single_gpu/ops/cublas.cuh"
#include "01_single_gpu/ops/grouped_matmul.h"

namespace train70b::cuda {
namespace {

constexpr int64_t kTile = 128;
constexpr int64_t kPointers = 64 << 10;  // bytes for pointers to matrices, at the end of the workspace

cublasHandle_t grouped_handle() {
    static cublasHandle_t made = nullptr;
    if (!made) {
        CUBLAS_CHECK(cublasCreate(&made));
        CUBLAS_CHECK(cublasSetStream(made, stream()));  // forgets the workspace: comes first
        const Tensor space = workspace();
        CUBLAS_CHECK(cublasSetWorkspace(made, space.raw(), size_t(space.bytes() - kPointers)));
        // Parts of a sum are added in fp32.
        CUBLAS_CHECK(cublasSetMathMode(
            made, cublasMath_t(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
    }
    return made;
}

}  // namespace

bool in_one_call(const Tensor& c, const Tensor& a, const Tensor& w, const std::vector<int64_t>& rows) {
    static const int multiprocessors = cuda_info().multiprocessors;
    grouped_handle();  // on every rank at the first call: making it can wait for the device
    if (c.size() == 0 || a.cols() == 0 || int64_t(3 * sizeof(void*) * rows.size()) > kPointers) return false;
    for (const Tensor* x : {&c, &a, &w})  // each group's matrices, too
        if (alignment_of(*x) < 16 || x->cols() * int64_t(size_of(x->dtype())) % 16 != 0) return false;
    const int64_t groups = int64_t(rows.size()), mean = (a.rows() + groups - 1) / groups;
    return int64_t(blocks_for(mean, kTile)) * blocks_for(c.cols(), kTile) < multiprocessors;
}

void grouped_matmul(Tensor& c, const Tensor& a, const Tensor& w, const std::vector<int64_t>& rows,
                    Transpose transpose) {
    const auto at = [](const Tensor& x, int64_t row) {
        return static_cast<const char*>(x.raw()) + row * x.cols() * int64_t(size_of(x.dtype()));
    };
    std::vector<int64_t> n;  // rows of the groups that have any
    std::vector<const void*> of_w, of_a, of_c;
    int64_t begin = 0;
    for (size_t g = 0; g < rows.size(); begin += rows[g++]) {
        if (rows[g] == 0) continue;
        n.push_back(rows[g]);
        of_w.push_back(at(w, int64_t(g) * w.rows() / int64_t(rows.size())));
        of_a.push_back(at(a, begin));
        of_c.push_back(at(c, begin));
    }
    const size_t count = n.size();
    std::vector<const void*> pointers = of_w;
    pointers.insert(pointers.end(), of_a.begin(), of_a.end());
    pointers.insert(pointers.end(), of_c.begin(), of_c.end());
    cublasHandle_t handle = grouped_handle();
    const Tensor space = workspace();
    void** on_device = reinterpret_cast<void**>(static_cast<char*>(space.raw()) + space.bytes() - kPointers);
    cuda_upload(on_device, pointers.data(), int64_t(pointers.size() * sizeof(void*)));

    const auto all = [&](auto value) { return std::vector<decltype(value)>(count, value); };
    const auto op_w = all(transpose == Transpose::b ? CUBLAS_OP_T : CUBLAS_OP_N), op_a = all(CUBLAS_OP_N);
    const auto m = all(c.cols()), k = all(a.cols()), w_cols = all(w.cols()), one = all(int64_t(1));
    const auto alpha = all(1.0f), beta = all(0.0f);
    const cudaDataType_t type = cuda_type(c.dtype());
    CUBLAS_CHECK(cublasGemmGroupedBatchedEx_64(handle, op_w.data(), op_a.data(), m.data(), n.data(), k.data(),
                                               alpha.data(), on_device, type, w_cols.data(), on_device + count, type,
                                               k.data(), beta.data(), on_device + 2 * count, type, m.data(),
                                               int64_t(count), one.data(), CUBLAS_COMPUTE_32F));
}

}  // namespace train70b::cuda
