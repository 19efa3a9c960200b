// matmul.h on the CPU, with OpenBLAS where oneDNN does not serve: what matmul.cu is tested against. Then checks and
// dispatch.
#include "01_single_gpu/ops/matmul.h"

#include <cblas.h>

#include "01_single_gpu/core/blas_core.h"
#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"
#include "01_single_gpu/ops/elementwise.h"

namespace train70b {

namespace cpu {
namespace {

// The BLAS's product in fp32, and in fp64.
decltype(cblas_sgemm)* gemm(float) { return cblas_sgemm; }
decltype(cblas_dgemm)* gemm(double) { return cblas_dgemm; }

// x itself when it is fp32, else a copy.
Tensor in_fp32(const Tensor& x) {
    if (x.dtype() == DType::f32) return x;
    Tensor wide(x.shape(), DType::f32, Device::cpu, Memory::workspace);
    cpu::copy(wide, x);
    return wide;
}

}  // namespace

std::string product_kernels(DType dtype) {
    const std::string onednn = dtype == DType::f64 ? "" : onednn_kernels();
    return onednn.empty() ? "OpenBLAS " + blas_core() : onednn;
}

void matmul_into(Tensor& c, const Tensor& a, const Tensor& b, Transpose transpose, float beta, Rows rows) {
    if (onednn_matmul_into(c, a, b, transpose, beta)) return;
    if (a.dtype() == DType::bf16 || c.dtype() == DType::bf16) {
        Tensor sums = c.dtype() == DType::f32 ? c : Tensor(c.shape(), DType::f32, Device::cpu, Memory::workspace);
        if (c.dtype() != DType::f32 && beta != 0) cpu::copy(sums, c);
        cpu::matmul_into(sums, in_fp32(a), in_fp32(b), transpose, beta, rows);
        if (c.dtype() != DType::f32) cpu::copy(c, sums);
        return;
    }
    const bool ta = transpose == Transpose::a, tb = transpose == Transpose::b;
    with_wide(a.dtype(), [&]<class C>(C) {
        gemm(C())(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans, c.rows(), c.cols(),
                  ta ? a.rows() : a.cols(), C(1), a.data<C>(), a.cols(), b.data<C>(), b.cols(), C(beta), c.data<C>(),
                  c.cols());
    });
}

}  // namespace cpu

namespace cuda {  // matmul.cu
decltype(train70b::matmul_into) matmul_into;
}  // namespace cuda

void matmul_into(Tensor& c, const Tensor& a, const Tensor& b, Transpose transpose, float beta, Rows rows) {
    const int64_t m = transpose == Transpose::a ? a.cols() : a.rows();
    const int64_t k = transpose == Transpose::a ? a.rows() : a.cols();
    const int64_t n = transpose == Transpose::b ? b.rows() : b.cols();
    CHECK(is_float(a.dtype()) && a.dtype() == b.dtype() &&
              (c.dtype() == a.dtype() || c.dtype() == stats_dtype(a.dtype())),
          "a {}, b {}, c {}", name_of(a.dtype()), name_of(b.dtype()), name_of(c.dtype()));
    CHECK((transpose == Transpose::b ? b.cols() : b.rows()) == k, "a {} b {}", to_string(a.shape()),
          to_string(b.shape()));
    expect_rows("c", c, m, n, c.dtype());
    Span span("matmul", "op", 2.0 * m * n * k, bytes_of({a, b, c}), {{m, n, k}, a.dtype()});
    if (k == 0) return beta == 0 ? fill(c, 0) : scale(c, beta);  // a sum of nothing
    if (c.size() == 0) return;                                   // the libraries take no empty matrices
    DISPATCH(device_of({c, a, b}), matmul_into(c, a, b, transpose, beta, rows));
}

Tensor matmul(const Tensor& a, const Tensor& b, Transpose transpose, Memory kind) {
    const int64_t m = transpose == Transpose::a ? a.cols() : a.rows();
    const int64_t n = transpose == Transpose::b ? b.rows() : b.cols();
    Tensor c({m, n}, a.dtype(), a.device(), kind);
    matmul_into(c, a, b, transpose);
    return c;
}

}  // namespace train70b
