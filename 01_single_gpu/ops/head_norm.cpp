// head_norm.h on the CPU: the definition that head_norm.cu is tested against. Then checks and dispatch.
#include "01_single_gpu/ops/head_norm.h"

#include "01_single_gpu/core/dispatch.h"
#include "01_single_gpu/ops/attention_shape.h"
#include "01_single_gpu/ops/row_norm.h"

namespace train70b {

namespace cpu {
namespace {

struct PackedHeads {
    int64_t size, q, k, all;  // D, H, K, H+2K
    PackedHeads(const Tensor& qkv, const Tensor& weight, int64_t kv_width)
        : size(weight.size()), k(kv_width / size), all(qkv.cols() / size) {
        q = all - 2 * k;
    }
};

// dweight_d += sum over rows and the heads [first, end) of dy * x * inv_rms.
template <class T>
void add_weight_gradient(Tensor& dweight, const Tensor& dy, const Tensor& x, const std::vector<Wide<T>>& inv_rms,
                         const PackedHeads& heads, int64_t first, int64_t end) {
    using C = Wide<T>;
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

void head_norm(Tensor& y, const Tensor& qkv, const Tensor& q_weight, const Tensor& k_weight, int64_t kv_width,
               double eps) {
    const PackedHeads heads(qkv, q_weight, kv_width);
    with_float(qkv.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using C = Wide<T>;
        const int64_t cols = qkv.cols(), D = heads.size;
        parallel_rows(qkv.rows(), cols, [&](int64_t r) {
            for (int64_t h = 0; h < heads.q + heads.k; ++h) {
                const T *x = qkv.data<T>() + r * cols + h * D,
                        *weight = h < heads.q ? q_weight.data<T>() : k_weight.data<T>();
                T* out = y.data<T>() + r * cols + h * D;
                const C inv = inv_rms_of(x, D, eps);
                vectorized(0, D, [&](int64_t d) { out[d] = T(C(x[d]) * inv * C(weight[d])); });
            }
            const int64_t v = r * cols + (heads.q + heads.k) * D;
            std::copy_n(qkv.data<T>() + v, heads.k * D, y.data<T>() + v);
        });
    });
}

void head_norm_backward(Tensor& grad, Tensor& dq_weight, Tensor& dk_weight, const Tensor& qkv, const Tensor& q_weight,
                        const Tensor& k_weight, int64_t kv_width, double eps) {
    const PackedHeads heads(qkv, q_weight, kv_width);
    with_float(qkv.dtype(), [&](auto zero) {
        using T = decltype(zero);
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
                const C inv = inv_rms[head];
                const C dot = reduced<C>(0, D, [&](int64_t i) { return C(d[i]) * C(weight[i]) * C(x[i]); });
                const C mean = dot * inv * inv / C(D);
                vectorized(0, D, [&](int64_t i) { d[i] = T(inv * (C(d[i]) * C(weight[i]) - C(x[i]) * mean)); });
            }
        });
    });
}

}  // namespace cpu

namespace cuda {  // head_norm.cu
decltype(train70b::head_norm) head_norm;
decltype(train70b::head_norm_backward) head_norm_backward;
}  // namespace cuda

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
