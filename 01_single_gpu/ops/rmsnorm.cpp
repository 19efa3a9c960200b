// rmsnorm.h on the CPU: the definition that rmsnorm.cu is tested against. Then checks and dispatch.
#include "01_single_gpu/ops/rmsnorm.h"

#include "01_single_gpu/core/dispatch.h"
#include "01_single_gpu/ops/elementwise.h"
#include "01_single_gpu/ops/row_norm.h"

namespace train70b {

namespace cpu {
namespace {

template <class T>
void norm_row(T* y, const T* x, const T* weight, Wide<T> inv, int64_t cols) {
    using C = Wide<T>;
    vectorized(0, cols, [&](int64_t c) { y[c] = T(C(x[c]) * inv * C(weight[c])); });
}

}  // namespace

void rmsnorm(Tensor& y, Tensor& inv_rms, const Tensor& x, const Tensor& weight, double eps) {
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const int64_t cols = x.cols();
        parallel_rows(x.rows(), cols, [&](int64_t r) {
            const T* in = x.data<T>() + r * cols;
            const auto inv = inv_rms.data<Wide<T>>()[r] = inv_rms_of(in, cols, eps);
            norm_row(y.data<T>() + r * cols, in, weight.data<T>(), inv, cols);
        });
    });
}

void add_rmsnorm(Tensor& sum, Tensor& y, Tensor& inv_rms, const Tensor& a, const Tensor& b, const Tensor& weight,
                 double eps) {
    cpu::add(sum, a, b);
    cpu::rmsnorm(y, inv_rms, sum, weight, eps);
}

void rmsnorm_recompute(Tensor& y, const Tensor& x, const Tensor& inv_rms, const Tensor& weight) {
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const int64_t cols = x.cols();
        parallel_rows(x.rows(), cols, [&](int64_t r) {
            norm_row(y.data<T>() + r * cols, x.data<T>() + r * cols, weight.data<T>(), inv_rms.data<Wide<T>>()[r],
                     cols);
        });
    });
}

void rmsnorm_backward(Tensor& dx, Tensor& dweight, const Tensor& dy, const Tensor& x, const Tensor& inv_rms,
                      const Tensor& weight) {
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using C = Wide<T>;
        const int64_t rows = x.rows(), cols = x.cols();
        const C* inv = inv_rms.data<C>();
        parallel_rows(rows, cols, [&](int64_t r) {
            const T *in = x.data<T>() + r * cols, *d = dy.data<T>() + r * cols, *w = weight.data<T>();
            T* out = dx.data<T>() + r * cols;
            const C dot = reduced<C>(0, cols, [&](int64_t c) { return C(d[c]) * C(w[c]) * C(in[c]); });
            const C mean = dot * inv[r] * inv[r] / C(cols);
            vectorized(0, cols, [&](int64_t c) { out[c] = T(inv[r] * (C(d[c]) * C(w[c]) - C(in[c]) * mean)); });
        });
        add_column_sums<C>(dweight, rows, [&](C* sum, int64_t r, int64_t begin, int64_t end) {
            const T *in = x.data<T>() + r * cols + begin, *d = dy.data<T>() + r * cols + begin;
#pragma omp simd
            for (int64_t c = 0; c < end - begin; ++c) sum[c] += C(d[c]) * C(in[c]) * inv[r];
        });
    });
}

}  // namespace cpu

namespace cuda {  // rmsnorm.cu
decltype(train70b::rmsnorm) rmsnorm;
decltype(train70b::add_rmsnorm) add_rmsnorm;
decltype(train70b::rmsnorm_recompute) rmsnorm_recompute;
decltype(train70b::rmsnorm_backward) rmsnorm_backward;
}  // namespace cuda

void rmsnorm(Tensor& y, Tensor& inv_rms, const Tensor& x, const Tensor& weight, double eps) {
    expect_rows("y", y, x.rows(), x.cols(), x.dtype());
    expect("inv_rms", inv_rms, {x.rows()}, stats_dtype(x.dtype()));
    expect("weight", weight, {x.cols()}, x.dtype());
    Span span("rmsnorm", "op", 0, bytes_of({y, x}));
    DISPATCH(device_of({y, inv_rms, x, weight}), rmsnorm(y, inv_rms, x, weight, eps));
}

void add_rmsnorm(Tensor& sum, Tensor& y, Tensor& inv_rms, const Tensor& a, const Tensor& b, const Tensor& weight,
                 double eps) {
    for (const Tensor& part : List{sum, y, b}) expect_rows("sum, y or b", part, a.rows(), a.cols(), a.dtype());
    expect("inv_rms", inv_rms, {a.rows()}, stats_dtype(a.dtype()));
    expect("weight", weight, {a.cols()}, a.dtype());
    Span span("add_rmsnorm", "op", 0, bytes_of({sum, y, a, b}));
    DISPATCH(device_of({sum, y, inv_rms, a, b, weight}), add_rmsnorm(sum, y, inv_rms, a, b, weight, eps));
}

void rmsnorm_recompute(Tensor& y, const Tensor& x, const Tensor& inv_rms, const Tensor& weight) {
    expect_rows("y", y, x.rows(), x.cols(), x.dtype());
    expect("inv_rms", inv_rms, {x.rows()}, stats_dtype(x.dtype()));
    expect("weight", weight, {x.cols()}, x.dtype());
    Span span("rmsnorm_recompute", "op", 0, bytes_of({y, x}));
    DISPATCH(device_of({y, inv_rms, x, weight}), rmsnorm_recompute(y, x, inv_rms, weight));
}

void rmsnorm_backward(Tensor& dx, Tensor& dweight, const Tensor& dy, const Tensor& x, const Tensor& inv_rms,
                      const Tensor& weight) {
    for (const Tensor& part : List{dx, dy}) expect_rows("dx or dy", part, x.rows(), x.cols(), x.dtype());
    expect("inv_rms", inv_rms, {x.rows()}, stats_dtype(x.dtype()));
    expect("weight", weight, {x.cols()}, x.dtype());
    CHECK(dweight.shape() == weight.shape() && is_float(dweight.dtype()), "dweight {}", to_string(dweight.shape()));
    Span span("rmsnorm_backward", "op", 0, bytes_of({dx, dy, x}));
    DISPATCH(device_of({dx, dweight, dy, x, inv_rms, weight}), rmsnorm_backward(dx, dweight, dy, x, inv_rms, weight));
}

}  // namespace train70b
