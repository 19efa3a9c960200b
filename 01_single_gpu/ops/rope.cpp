// rope.h on the CPU: the definition that rope.cu is tested against. Then checks and dispatch.
#include "01_single_gpu/ops/rope.h"

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"
#include "01_single_gpu/ops/rotation.h"

namespace train70b {

namespace cpu {
namespace {

// direction +1: forward; -1: the transposed (inverse) rotation, which is the gradient.
template <class T>
void rotate_heads(T* out, const T* in, int64_t heads, int half, const Rotation<Wide<T>>& rotation, int direction) {
    for (int64_t h = 0; h < heads; ++h, in += 2 * half, out += 2 * half) {
        vectorized(0, half, [&](int64_t i) {
            const Wide<T> a = in[i], b = in[i + half], c = rotation.cos[i], s = Wide<T>(direction) * rotation.sin[i];
            out[i] = T(a * c - b * s);
            out[i + half] = T(b * c + a * s);
        });
    }
}

}  // namespace

void split_rope(Tensor& q, Tensor& k, Tensor& v, const Tensor& qkv, const Tensor& positions, const Rope& rope) {
    with_float(qkv.dtype(), [&]<class T>(T) {
        const int64_t q_cols = q.cols(), kv_cols = k.cols();
        const int half = rope.head_dim / 2;
        rotate_rows<Wide<T>>(rope, positions, qkv.cols(), [&](int64_t r, const auto& rotation) {
            const T* in = qkv.data<T>() + r * (q_cols + 2 * kv_cols);
            rotate_heads(q.data<T>() + r * q_cols, in, q_cols / rope.head_dim, half, rotation, 1);
            rotate_heads(k.data<T>() + r * kv_cols, in + q_cols, kv_cols / rope.head_dim, half, rotation, 1);
            std::copy_n(in + q_cols + kv_cols, kv_cols, v.data<T>() + r * kv_cols);
        });
    });
}

void split_rope_backward(Tensor& dqkv, const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& positions,
                         const Rope& rope) {
    with_float(dqkv.dtype(), [&]<class T>(T) {
        const int64_t q_cols = dq.cols(), kv_cols = dk.cols();
        const int half = rope.head_dim / 2;
        rotate_rows<Wide<T>>(rope, positions, dqkv.cols(), [&](int64_t r, const auto& rotation) {
            T* out = dqkv.data<T>() + r * (q_cols + 2 * kv_cols);
            rotate_heads(out, dq.data<T>() + r * q_cols, q_cols / rope.head_dim, half, rotation, -1);
            rotate_heads(out + q_cols, dk.data<T>() + r * kv_cols, kv_cols / rope.head_dim, half, rotation, -1);
            std::copy_n(dv.data<T>() + r * kv_cols, kv_cols, out + q_cols + kv_cols);
        });
    });
}

}  // namespace cpu

namespace cuda {  // rope.cu
decltype(train70b::split_rope) split_rope;
decltype(train70b::split_rope_backward) split_rope_backward;
}  // namespace cuda

namespace {
void check_rope(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& qkv, const Tensor& positions,
                const Rope& rope) {
    CHECK(rope.head_dim > 0 && rope.head_dim % 2 == 0 && rope.head_dim <= kMaxHeadDim, "head_dim {}", rope.head_dim);
    expect("positions", positions, {qkv.rows()}, DType::i32);
    CHECK(q.cols() % rope.head_dim == 0 && k.cols() % rope.head_dim == 0, "q {} k {} for heads of {}",
          to_string(q.shape()), to_string(k.shape()), rope.head_dim);
    expect_rows("q", q, qkv.rows(), q.cols(), qkv.dtype());
    for (const Tensor& part : List{k, v}) expect_rows("k or v", part, qkv.rows(), k.cols(), qkv.dtype());
    expect_rows("qkv", qkv, qkv.rows(), q.cols() + 2 * k.cols(), qkv.dtype());
}
}  // namespace

void split_rope(Tensor& q, Tensor& k, Tensor& v, const Tensor& qkv, const Tensor& positions, const Rope& rope) {
    check_rope(q, k, v, qkv, positions, rope);
    Span span("split_rope", "op", 0, 2 * bytes_of({qkv}));
    DISPATCH(device_of({q, k, v, qkv, positions}), split_rope(q, k, v, qkv, positions, rope));
}

void split_rope_backward(Tensor& dqkv, const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& positions,
                         const Rope& rope) {
    check_rope(dq, dk, dv, dqkv, positions, rope);
    Span span("split_rope_backward", "op", 0, 2 * bytes_of({dqkv}));
    DISPATCH(device_of({dq, dk, dv, dqkv, positions}), split_rope_backward(dqkv, dq, dk, dv, positions, rope));
}

}  // namespace train70b
