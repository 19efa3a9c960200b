// rope.h on a GPU: one block per row.
#include "01_single_gpu/core/cuda.cuh"
#include "01_single_gpu/ops/rope.h"

namespace train70b::cuda {
namespace {

constexpr double kHalfTurns = 0.31830988618379067;  // 1 / pi

// forward: qkv -> q, k, v. Otherwise the gradient: q, k, v -> qkv with the inverse rotation.
template <class T, bool forward, bool wide>
__global__ void split_rope_kernel(T* q, T* k, T* v, T* qkv, const int32_t* positions, Rope rope, int64_t q_cols,
                                  int64_t kv_cols) {
    __shared__ float cosines[kMaxHeadDim / 2], sines[kMaxHeadDim / 2];
    const int64_t row = blockIdx.x;
    const int half = rope.head_dim / 2;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        double s, c;  // by half turns: sincos() of a large angle keeps its reduction in local memory
        sincospi(positions[row] * rope.inv_freq[i] * kHalfTurns, &s, &c);
        cosines[i] = float(c);
        sines[i] = forward ? float(s) : -float(s);
    }
    __syncthreads();
    T* packed = qkv + row * (q_cols + 2 * kv_cols);
    const int packs = (half + kPack - 1) / kPack;  // of the first half of a head
    const int64_t heads = (q_cols + 2 * kv_cols) / rope.head_dim, rotated = (q_cols + kv_cols) / rope.head_dim;
    for (int64_t work = threadIdx.x; work < heads * packs; work += blockDim.x) {
        const int64_t head = work / packs, column = head * rope.head_dim;  // of the packed row
        const int i = int(work % packs) * kPack;
        T* part = column < q_cols             ? q + row * q_cols + column
                  : column < q_cols + kv_cols ? k + row * kv_cols + column - q_cols
                                              : v + row * kv_cols + column - q_cols - kv_cols;
        T *from = forward ? packed + column : part, *to = forward ? part : packed + column;
        float a[kPack], b[kPack];
        load<wide>(a, from, i, half);
        load<wide>(b, from + half, i, half);
        if (head < rotated)
            for (int j = 0; j < kPack && (wide || i + j < half); ++j) {
                const float c = cosines[i + j], s = sines[i + j], x = a[j], y = b[j];
                a[j] = x * c - y * s;
                b[j] = y * c + x * s;
            }
        store<wide>(to, i, half, a);
        store<wide>(to + half, i, half, b);
    }
}

constexpr unsigned kRowThreads = 128;  // more rows in flight while each waits for its sines

bool wide_halves(const Rope& rope, std::initializer_list<const Tensor*> list) {
    return rope.head_dim % (2 * kPack) == 0 && in_packs(list);
}

}  // namespace

void split_rope(Tensor& q, Tensor& k, Tensor& v, const Tensor& qkv, const Tensor& positions, const Rope& rope) {
    with_float(qkv.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const bool wide = wide_halves(rope, {&q, &k, &v, &qkv});
        launch(wide ? split_rope_kernel<T, true, true> : split_rope_kernel<T, true, false>,
               {blocks_for(qkv.rows(), 1), kRowThreads}, q.data<T>(), k.data<T>(), v.data<T>(), qkv.data<T>(),
               positions.data<int32_t>(), rope, q.cols(), k.cols());
    });
}

void split_rope_backward(Tensor& dqkv, const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& positions,
                         const Rope& rope) {
    with_float(dqkv.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const bool wide = wide_halves(rope, {&dqkv, &dq, &dk, &dv});
        launch(wide ? split_rope_kernel<T, false, true> : split_rope_kernel<T, false, false>,
               {blocks_for(dqkv.rows(), 1), kRowThreads}, dq.data<T>(), dk.data<T>(), dv.data<T>(), dqkv.data<T>(),
               positions.data<int32_t>(), rope, dq.cols(), dk.cols());
    });
}

}  // namespace train70b::cuda
