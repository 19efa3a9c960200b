// latent_heads.h on the CPU: the definition that rope.cu is tested against. Then checks and dispatch.
#include "01_single_gpu/ops/latent_heads.h"

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"
#include "01_single_gpu/ops/rotation.h"

namespace train70b {

namespace cpu {
namespace {

// The pairs (2i, 2i+1) of P numbers. direction -1: back, which is the gradient.
template <class To, class From, class C>
void rotate_pairs(To* to, const From* from, int64_t P, const Rotation<C>& rotation, int direction) {
    for (int64_t i = 0; i < P / 2; ++i) {
        const C a = C(from[2 * i]), b = C(from[2 * i + 1]), c = rotation.cos[i], s = C(direction) * rotation.sin[i];
        to[2 * i] = To(a * c - b * s);
        to[2 * i + 1] = To(b * c + a * s);
    }
}

}  // namespace

void latent_heads(Tensor& q, Tensor& k, Tensor& v, const Tensor& q_in, const Tensor& kv, const Tensor& k_rope,
                  const Tensor& positions, const Rope& rope) {
    with_float(q.dtype(), [&]<class T>(T) {
        const int64_t P = rope.head_dim, H = (q.cols() - kv.cols() / 2) / P, D = q.cols() / H, N = D - P;
        rotate_rows<Wide<T>>(rope, positions, 3 * q.cols(), [&](int64_t r, const auto& rotation) {
            for (int64_t i = r * H; i < (r + 1) * H; ++i) {
                const T *from_q = q_in.data<T>() + i * D, *from_kv = kv.data<T>() + i * 2 * N;
                T *to_q = q.data<T>() + i * D, *to_k = k.data<T>() + i * D, *to_v = v.data<T>() + i * D;
                std::copy_n(from_q, N, to_q);
                std::copy_n(from_kv, N, to_k);
                std::copy_n(from_kv + N, N, to_v);
                rotate_pairs(to_q + N, from_q + N, P, rotation, 1);
                rotate_pairs(to_k + N, k_rope.data<T>() + r * P, P, rotation, 1);
                std::fill_n(to_v + N, P, T(0));
            }
        });
    });
}

void latent_heads_backward(Tensor& dq_in, Tensor& dkv, Tensor& dk_rope, const Tensor& dq, const Tensor& dk,
                           const Tensor& dv, const Tensor& positions, const Rope& rope) {
    with_float(dq.dtype(), [&]<class T>(T) {
        const int64_t P = rope.head_dim, H = (dq.cols() - dkv.cols() / 2) / P, D = dq.cols() / H, N = D - P;
        rotate_rows<Wide<T>>(rope, positions, 3 * dq.cols(), [&](int64_t r, const auto& rotation) {
            Wide<T> sum[kMaxHeadDim] = {};  // of the heads
            for (int64_t i = r * H; i < (r + 1) * H; ++i) {
                const T *from_q = dq.data<T>() + i * D, *from_k = dk.data<T>() + i * D;
                T *to_q = dq_in.data<T>() + i * D, *to_kv = dkv.data<T>() + i * 2 * N;
                std::copy_n(from_q, N, to_q);
                std::copy_n(from_k, N, to_kv);
                std::copy_n(dv.data<T>() + i * D, N, to_kv + N);
                rotate_pairs(to_q + N, from_q + N, P, rotation, -1);
                for (int64_t p = 0; p < P; ++p) sum[p] += Wide<T>(from_k[N + p]);
            }
            rotate_pairs(dk_rope.data<T>() + r * P, sum, P, rotation, -1);
        });
    });
}

void copy_columns(Tensor& to, int64_t to_begin, const Tensor& from, int64_t from_begin, int64_t width) {
    with_float(to.dtype(), [&]<class T>(T) {
        parallel_rows(to.rows(), width, [&](int64_t r) {
            std::copy_n(from.data<T>() + r * from.cols() + from_begin, width, to.data<T>() + r * to.cols() + to_begin);
        });
    });
}

}  // namespace cpu

namespace cuda {  // rope.cu
decltype(train70b::latent_heads) latent_heads;
decltype(train70b::latent_heads_backward) latent_heads_backward;
decltype(train70b::copy_columns) copy_columns;
}  // namespace cuda

namespace {
void check_heads(List q, const Tensor& k, const Tensor& v, const Tensor& kv, const Tensor& k_rope,
                 const Tensor& positions, const Rope& rope) {
    const Tensor& first = *q.begin();
    const int64_t P = rope.head_dim, H = P > 0 ? (first.cols() - kv.cols() / 2) / P : 0;
    CHECK(P > 0 && P % 2 == 0 && P <= kMaxHeadDim && H > 0 && kv.cols() % (2 * H) == 0 &&
              first.cols() == H * P + kv.cols() / 2,
          "q {}, kv {}, rotated {}", to_string(first.shape()), to_string(kv.shape()), P);
    const int64_t rows = first.rows();
    for (const Tensor& x : q) expect_rows("q", x, rows, first.cols(), first.dtype());
    for (const Tensor& x : List{k, v}) expect_rows("k or v", x, rows, first.cols(), first.dtype());
    expect_rows("kv", kv, rows, kv.cols(), first.dtype());
    expect_rows("k_rope", k_rope, rows, P, first.dtype());
    expect("positions", positions, {rows}, DType::i32);
}
}  // namespace

void latent_heads(Tensor& q, Tensor& k, Tensor& v, const Tensor& q_in, const Tensor& kv, const Tensor& k_rope,
                  const Tensor& positions, const Rope& rope) {
    check_heads({q, q_in}, k, v, kv, k_rope, positions, rope);
    Span span("latent_heads", "op", 0, bytes_of({q, k, v, q_in, kv, k_rope}));
    DISPATCH(device_of({q, k, v, q_in, kv, k_rope, positions}),
             latent_heads(q, k, v, q_in, kv, k_rope, positions, rope));
}

void latent_heads_backward(Tensor& dq_in, Tensor& dkv, Tensor& dk_rope, const Tensor& dq, const Tensor& dk,
                           const Tensor& dv, const Tensor& positions, const Rope& rope) {
    check_heads({dq, dq_in}, dk, dv, dkv, dk_rope, positions, rope);
    Span span("latent_heads_backward", "op", 0, bytes_of({dq, dk, dv, dq_in, dkv, dk_rope}));
    DISPATCH(device_of({dq, dk, dv, dq_in, dkv, dk_rope, positions}),
             latent_heads_backward(dq_in, dkv, dk_rope, dq, dk, dv, positions, rope));
}

void copy_columns(Tensor& to, int64_t to_begin, const Tensor& from, int64_t from_begin, int64_t width) {
    CHECK(to.dtype() == from.dtype() && to.rows() == from.rows() && to_begin >= 0 && from_begin >= 0 && width >= 0 &&
              to_begin + width <= to.cols() && from_begin + width <= from.cols(),
          "{} columns of {} from {} on, to {} from {} on", width, to_string(from.shape()), from_begin,
          to_string(to.shape()), to_begin);
    Span span("copy_columns", "op", 0, 2.0 * double(to.rows() * width * size_of(to.dtype())));
    DISPATCH(device_of({to, from}), copy_columns(to, to_begin, from, from_begin, width));
}

}  // namespace train70b
