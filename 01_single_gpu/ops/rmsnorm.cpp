// rmsnorm.h on the CPU: the definition that rmsnorm.cu is tested against. Then checks and dispatch.
#include "01_single_gpu/ops/rmsnorm.h"

#include <cmath>

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"
#include "01_single_gpu/ops/attention_shape.h"
#include "01_single_gpu/ops/elementwise.h"

namespace train70b {

namespace cpu {
namespace {

template <class T, class C = Wide<T>>
C inv_rms_of(const T* x, int64_t cols, double eps) {
    const C sum = reduced<C>(0, cols, [x](int64_t c) { return C(x[c]) * C(x[c]); });
    return C(1) / std::sqrt(sum / C(cols) + C(eps));
}

template <class T, class C = Wide<T>>
void norm_row(T* y, const T* x, const T* weight, Wide<T> inv, int64_t cols) {
    vectorized(0, cols, [&](int64_t c) { y[c] = T(C(x[c]) * inv * C(weight[c])); });
}

template <class T, class C = Wide<T>>
void norm_row_backward(T* dx, const T* dy, const T* x, const T* weight, Wide<T> inv, int64_t cols) {
    const C dot = reduced<C>(0, cols, [&](int64_t c) { return C(dy[c]) * C(weight[c]) * C(x[c]); });
    const C mean = dot * inv * inv / C(cols);
    vectorized(0, cols, [&](int64_t c) { dx[c] = T(inv * (C(dy[c]) * C(weight[c]) - C(x[c]) * mean)); });
}

struct PackedHeads {
    int64_t size, q, k, all;  // D, H, K, H+2K
    PackedHeads(const Tensor& qkv, const Tensor& weight, int64_t kv_width)
        : size(weight.size()), k(kv_width / size), all(qkv.cols() / size) {
        q = all - 2 * k;
    }
};

// dweight_d += sum over rows and the heads [first, end) of dy * x * inv_rms.
template <class T, class C>
void add_weight_gradient(Tensor& dweight, const Tensor& dy, const Tensor& x, const std::vector<C>& inv_rms,
                         const PackedHeads& heads, int64_t first, int64_t end) {
    const int64_t D = heads.size;
    add_column_sums<C>(dweight, x.rows(), [&](C* sum, int64_t r, int64_t from, int64_t to) {
        C of_row[kMaxHeadDim] = {};
        for (int64_t h = first; h < end; ++h) {
            const int64_t head = r * heads.all + h;
            const T *in = x.data<T>() + head * D + from, *d = dy.data<T>() + head * D + from;
            const C inv = inv_rms[head];
#pragma omp simd
            for (int64_t i = 0; i < to - from; ++i) of_row[i] += C(d[i]) * C(in[i]) * inv;
        }
        for (int64_t i = 0; i < to - from; ++i) sum[i] += of_row[i];
    });
}

}  // namespace

void rmsnorm(Tensor& y, Tensor& inv_rms, const Tensor& x, const Tensor& weight, double eps) {
    with_float(x.dtype(), [&]<class T>(T) {
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
    with_float(x.dtype(), [&]<class T>(T) {
        const int64_t cols = x.cols();
        parallel_rows(x.rows(), cols, [&](int64_t r) {
            norm_row(y.data<T>() + r * cols, x.data<T>() + r * cols, weight.data<T>(), inv_rms.data<Wide<T>>()[r],
                     cols);
        });
    });
}

void rmsnorm_backward(Tensor& dx, Tensor& dweight, const Tensor& dy, const Tensor& x, const Tensor& inv_rms,
                      const Tensor& weight) {
    with_float(x.dtype(), [&]<class T>(T) {
        using C = Wide<T>;
        const int64_t rows = x.rows(), cols = x.cols();
        const C* inv = inv_rms.data<C>();
        parallel_rows(rows, cols, [&](int64_t r) {
            const int64_t at = r * cols;
            norm_row_backward(dx.data<T>() + at, dy.data<T>() + at, x.data<T>() + at, weight.data<T>(), inv[r], cols);
        });
        add_column_sums<C>(dweight, rows, [&](C* sum, int64_t r, int64_t begin, int64_t end) {
            const T *in = x.data<T>() + r * cols + begin, *d = dy.data<T>() + r * cols + begin;
#pragma omp simd
            for (int64_t c = 0; c < end - begin; ++c) sum[c] += C(d[c]) * C(in[c]) * inv[r];
        });
    });
}

void head_norm(Tensor& y, const Tensor& qkv, const Tensor& q_weight, const Tensor& k_weight, int64_t kv_width,
               double eps) {
    const PackedHeads heads(qkv, q_weight, kv_width);
    with_float(qkv.dtype(), [&]<class T>(T) {
        const int64_t cols = qkv.cols(), D = heads.size;
        parallel_rows(qkv.rows(), cols, [&](int64_t r) {
            for (int64_t h = 0; h < heads.q + heads.k; ++h) {
                const T *x = qkv.data<T>() + r * cols + h * D,
                        *weight = h < heads.q ? q_weight.data<T>() : k_weight.data<T>();
                T* out = y.data<T>() + r * cols + h * D;
                norm_row(out, x, weight, inv_rms_of(x, D, eps), D);
            }
            const int64_t v = r * cols + (heads.q + heads.k) * D;
            std::copy_n(qkv.data<T>() + v, heads.k * D, y.data<T>() + v);
        });
    });
}

void head_norm_backward(Tensor& grad, Tensor& dq_weight, Tensor& dk_weight, const Tensor& qkv, const Tensor& q_weight,
                        const Tensor& k_weight, int64_t kv_width, double eps) {
    const PackedHeads heads(qkv, q_weight, kv_width);
    with_float(qkv.dtype(), [&]<class T>(T) {
        using C = Wide<T>;
        const int64_t rows = qkv.rows(), D = heads.size;
        std::vector<C> inv_rms(rows * heads.all);  // (R, H+2K); those of v are not used
        parallel_rows(rows, qkv.cols(), [&](int64_t r) {
            for (int64_t h = r * heads.all; h < r * heads.all + heads.q + heads.k; ++h)
                inv_rms[h] = inv_rms_of(qkv.data<T>() + h * D, D, eps);
        });
        add_weight_gradient<T>(dq_weight, grad, qkv, inv_rms, heads, 0, heads.q);
        add_weight_gradient<T>(dk_weight, grad, qkv, inv_rms, heads, heads.q, heads.q + heads.k);
        parallel_rows(rows, qkv.cols(), [&](int64_t r) {
            for (int64_t h = 0; h < heads.q + heads.k; ++h) {
                const int64_t head = r * heads.all + h;
                const T *x = qkv.data<T>() + head * D, *weight = h < heads.q ? q_weight.data<T>() : k_weight.data<T>();
                T* d = grad.data<T>() + head * D;
                norm_row_backward(d, d, x, weight, inv_rms[head], D);
            }
        });
    });
}

}  // namespace cpu

namespace cuda {  // rmsnorm.cu
decltype(train70b::rmsnorm) rmsnorm;
decltype(train70b::add_rmsnorm) add_rmsnorm;
decltype(train70b::rmsnorm_recompute) rmsnorm_recompute;
decltype(train70b::rmsnorm_backward) rmsnorm_backward;
decltype(train70b::head_norm) head_norm;
decltype(train70b::head_norm_backward) head_norm_backward;
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

namespace {
void check_heads(const Tensor& qkv, const Tensor& q_weight, const Tensor& k_weight, int64_t kv_width) {
    const int64_t D = q_weight.size();
    CHECK(D > 0 && D <= kMaxHeadDim && kv_width % D == 0 && qkv.cols() % D == 0 && qkv.cols() > 2 * kv_width,
          "qkv {}, k and v {} wide, heads of {}", to_string(qkv.shape()), kv_width, D);
    for (const Tensor& weight : List{q_weight, k_weight}) expect("weight", weight, {D}, qkv.dtype());
}
}  // namespace

void head_norm(Tensor& y, const Tensor& qkv, const Tensor& q_weight, const Tensor& k_weight, int64_t kv_width,
               double eps) {
    check_heads(qkv, q_weight, k_weight, kv_width);
    expect_rows("y", y, qkv.rows(), qkv.cols(), qkv.dtype());
    Span span("head_norm", "op", 0, bytes_of({y, qkv}));
    DISPATCH(device_of({y, qkv, q_weight, k_weight}), head_norm(y, qkv, q_weight, k_weight, kv_width, eps));
}

void head_norm_backward(Tensor& grad, Tensor& dq_weight, Tensor& dk_weight, const Tensor& qkv, const Tensor& q_weight,
                        const Tensor& k_weight, int64_t kv_width, double eps) {
    check_heads(qkv, q_weight, k_weight, kv_width);
    expect_rows("grad", grad, qkv.rows(), qkv.cols(), qkv.dtype());
    for (const Tensor& dweight : List{dq_weight, dk_weight})
        CHECK(dweight.shape() == q_weight.shape() && is_float(dweight.dtype()), "dweight {}",
              to_string(dweight.shape()));
    Span span("head_norm_backward", "op", 0, 2 * bytes_of({grad}) + bytes_of({qkv}));
    DISPATCH(device_of({grad, dq_weight, dk_weight, qkv, q_weight, k_weight}),
             head_norm_backward(grad, dq_weight, dk_weight, qkv, q_weight, k_weight, kv_width, eps));
}

}  // namespace train70b
