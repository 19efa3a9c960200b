// rope.h and latent_heads.h on a GPU: one block per row.
#include "01_single_gpu/core/cuda.cuh"
#include "01_single_gpu/ops/latent_heads.h"

namespace train70b::cuda {
namespace {

// The rotation at one position. direction -1: the inverse, which is the gradient.
__device__ void fill_angles(float* cosines, float* sines, const Rope& rope, int32_t position, float direction) {
    constexpr double kHalfTurns = 0.31830988618379067;  // 1 / pi
    for (int i = threadIdx.x; i < rope.head_dim / 2; i += blockDim.x) {
        double s, c;  // by half turns: sincos() of a large angle keeps its reduction in local memory
        sincospi(position * rope.inv_freq[i] * kHalfTurns, &s, &c);
        cosines[i] = float(c);
        sines[i] = direction * float(s);
    }
    __syncthreads();
}

// forward: qkv -> q, k, v. Otherwise the gradient: q, k, v -> qkv with the inverse rotation.
template <class T, bool forward, bool wide>
__global__ void split_rope_kernel(T* q, T* k, T* v, T* qkv, const int32_t* positions, Rope rope, int64_t q_cols,
                                  int64_t kv_cols) {
    __shared__ float cosines[kMaxHeadDim / 2], sines[kMaxHeadDim / 2];
    const int64_t row = blockIdx.x;
    const int half = rope.head_dim / 2;
    fill_angles(cosines, sines, rope, positions[row], forward ? 1 : -1);
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

template <bool forward>
void split(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& qkv, const Tensor& positions,
           const Rope& rope) {
    const bool wide = rope.head_dim % (2 * kPack) == 0 && in_packs({&q, &k, &v, &qkv});
    with_float(qkv.dtype(), [&]<class T>(T) {
        launch(wide ? split_rope_kernel<T, forward, true> : split_rope_kernel<T, forward, false>,
               {blocks_for(qkv.rows(), 1), kRowThreads}, q, k, v, qkv, positions, rope, q.cols(), k.cols());
    });
}

// ---- latent_heads.h: a thread for each number of a head ----

struct Sizes {
    int heads, without, rotated;  // H, N, P
};
Sizes sizes_of(const Tensor& q, const Tensor& kv, const Rope& rope) {
    const int H = int((q.cols() - kv.cols() / 2) / rope.head_dim);
    return {H, int(kv.cols() / 2 / H), rope.head_dim};
}

// Number p of x's, rotated by its pair's angle.
template <class T>
__device__ float rotated(const T* x, int p, const float* cosines, const float* sines) {
    const float a = to_float(x[p & ~1]), b = to_float(x[p | 1]), c = cosines[p / 2], s = sines[p / 2];
    return p % 2 == 0 ? a * c - b * s : b * c + a * s;
}

template <class T>
__global__ void latent_heads_kernel(T* q, T* k, T* v, const T* q_in, const T* kv, const T* k_rope,
                                    const int32_t* positions, Rope rope, Sizes sizes) {
    __shared__ float cosines[kMaxHeadDim / 2], sines[kMaxHeadDim / 2];
    const int64_t row = blockIdx.x;
    fill_angles(cosines, sines, rope, positions[row], 1);
    const int N = sizes.without, D = N + sizes.rotated;
    for (int work = threadIdx.x; work < sizes.heads * D; work += blockDim.x) {
        const int d = work % D;
        const int64_t head = row * sizes.heads + work / D, to = head * D + d;
        if (d < N) {
            q[to] = q_in[to];
            k[to] = kv[head * 2 * N + d];
            v[to] = kv[head * 2 * N + N + d];
        } else {
            q[to] = from_float<T>(rotated(q_in + head * D + N, d - N, cosines, sines));
            k[to] = from_float<T>(rotated(k_rope + row * sizes.rotated, d - N, cosines, sines));
            v[to] = from_float<T>(0);
        }
    }
}

template <class T>
__global__ void latent_heads_backward_kernel(T* dq_in, T* dkv, T* dk_rope, const T* dq, const T* dk, const T* dv,
                                             const int32_t* positions, Rope rope, Sizes sizes) {
    __shared__ float cosines[kMaxHeadDim / 2], sines[kMaxHeadDim / 2], sums[kMaxHeadDim];
    const int64_t row = blockIdx.x;
    const int N = sizes.without, P = sizes.rotated, D = N + P;
    for (int p = threadIdx.x; p < P; p += blockDim.x) {
        float sum = 0;
        for (int h = 0; h < sizes.heads; ++h) sum += to_float(dk[(row * sizes.heads + h) * D + N + p]);
        sums[p] = sum;
    }
    fill_angles(cosines, sines, rope, positions[row], -1);
    for (int p = threadIdx.x; p < P; p += blockDim.x)
        dk_rope[row * P + p] = from_float<T>(rotated(sums, p, cosines, sines));
    for (int work = threadIdx.x; work < sizes.heads * D; work += blockDim.x) {
        const int d = work % D;
        const int64_t head = row * sizes.heads + work / D, from = head * D + d;
        dq_in[from] = d < N ? dq[from] : from_float<T>(rotated(dq + head * D + N, d - N, cosines, sines));
        if (d >= N) continue;
        dkv[head * 2 * N + d] = dk[from];
        dkv[head * 2 * N + N + d] = dv[from];
    }
}

template <class T>
__global__ void copy_columns_kernel(T* to, int64_t to_cols, const T* from, int64_t from_cols, int64_t rows,
                                    int64_t width) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, row = i / width, col = i % width;
    if (row < rows) to[row * to_cols + col] = from[row * from_cols + col];
}

}  // namespace

void split_rope(Tensor& q, Tensor& k, Tensor& v, const Tensor& qkv, const Tensor& positions, const Rope& rope) {
    split<true>(q, k, v, qkv, positions, rope);
}

void split_rope_backward(Tensor& dqkv, const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& positions,
                         const Rope& rope) {
    split<false>(dq, dk, dv, dqkv, positions, rope);
}

void latent_heads(Tensor& q, Tensor& k, Tensor& v, const Tensor& q_in, const Tensor& kv, const Tensor& k_rope,
                  const Tensor& positions, const Rope& rope) {
    with_float(q.dtype(), [&]<class T>(T) {
        launch(latent_heads_kernel<T>, {blocks_for(q.rows(), 1)}, q, k, v, q_in, kv, k_rope, positions, rope,
               sizes_of(q, kv, rope));
    });
}

void latent_heads_backward(Tensor& dq_in, Tensor& dkv, Tensor& dk_rope, const Tensor& dq, const Tensor& dk,
                           const Tensor& dv, const Tensor& positions, const Rope& rope) {
    with_float(dq.dtype(), [&]<class T>(T) {
        launch(latent_heads_backward_kernel<T>, {blocks_for(dq.rows(), 1)}, dq_in, dkv, dk_rope, dq, dk, dv, positions,
               rope, sizes_of(dq, dkv, rope));
    });
}

void copy_columns(Tensor& to, int64_t to_begin, const Tensor& from, int64_t from_begin, int64_t width) {
    with_float(to.dtype(), [&]<class T>(T) {
        launch(copy_columns_kernel<T>, {blocks_for(to.rows() * width, kThreads)}, to.data<T>() + to_begin, to.cols(),
               from.data<T>() + from_begin, from.cols(), to.rows(), width);
    });
}

}  // namespace train70b::cuda
