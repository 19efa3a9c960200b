// head_norm.h on a GPU: one warp per head, whose lanes hold every 32nd of its elements.
#include "01_single_gpu/ops/attention_shape.h"
#include "01_single_gpu/ops/column_sums.cuh"
#include "01_single_gpu/ops/head_norm.h"

namespace train70b::cuda {
namespace {

constexpr int kWarps = kThreads / 32, kPerLane = kMaxHeadDim / 32;

struct Heads {
    int64_t q, k;  // H, K
    int size;      // D
};

__device__ float warp_sum(float value) {  // every lane gets the result
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    return value;
}

template <class T>
__device__ float inv_rms_of(const T* x, int size, float eps) {
    float squares = 0;
    for (int d = threadIdx.x % 32; d < size; d += 32) squares += to_float(x[d]) * to_float(x[d]);
    return rsqrtf(warp_sum(squares) / float(size) + eps);
}

// One block per row.
template <class T>
__global__ void head_norm_kernel(T* y, const T* qkv, const T* q_weight, const T* k_weight, Heads heads, float eps) {
    const int64_t all = heads.q + 2 * heads.k;
    for (int64_t h = threadIdx.x / 32; h < all; h += kWarps) {
        const int64_t at = (blockIdx.x * all + h) * heads.size;
        const bool is_v = h >= heads.q + heads.k;
        const T* weight = h < heads.q ? q_weight : k_weight;
        const float inv = is_v ? 1 : inv_rms_of(qkv + at, heads.size, eps);
        for (int d = threadIdx.x % 32; d < heads.size; d += 32)
            y[at + d] = is_v ? qkv[at + d] : from_float<T>(to_float(qkv[at + d]) * inv * to_float(weight[d]));
    }
}

// Each block loops over its rows. Its warps sum their heads' parts of the weights' gradients in registers, then in
// shared memory (kWarps, 2 D), to be written to the block's row of partial (gridDim.x, 2 D) fp32: [dq_weight |
// dk_weight].
template <class T>
__global__ void head_norm_backward_kernel(T* grad, float* partial, const T* qkv, const T* q_weight, const T* k_weight,
                                          Heads heads, int64_t rows, float eps) {
    extern __shared__ float4 shared[];
    float* sums = reinterpret_cast<float*>(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t all = heads.q + 2 * heads.k;
    float of_q[kPerLane] = {}, of_k[kPerLane] = {};
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x)
        for (int64_t h = warp; h < heads.q + heads.k; h += kWarps) {
            const bool is_q = h < heads.q;
            T* dy = grad + (r * all + h) * heads.size;
            const T *x = qkv + (r * all + h) * heads.size, *weight = is_q ? q_weight : k_weight;
            const float inv = inv_rms_of(x, heads.size, eps);
            float dot = 0;
            for (int d = lane; d < heads.size; d += 32) dot += to_float(dy[d]) * to_float(weight[d]) * to_float(x[d]);
            const float mean = warp_sum(dot) * inv * inv / float(heads.size);
#pragma unroll
            for (int i = 0; i < kPerLane; ++i) {
                const int d = lane + 32 * i;
                if (d >= heads.size) continue;
                const float g = to_float(dy[d]), v = to_float(x[d]);
                (is_q ? of_q[i] : of_k[i]) += g * v * inv;
                dy[d] = from_float<T>(inv * (g * to_float(weight[d]) - v * mean));
            }
        }
    for (int i = 0; i < kPerLane; ++i) {
        const int d = lane + 32 * i;
        if (d >= heads.size) continue;
        sums[(2 * warp) * heads.size + d] = of_q[i];
        sums[(2 * warp + 1) * heads.size + d] = of_k[i];
    }
    __syncthreads();
    for (int c = threadIdx.x; c < 2 * heads.size; c += blockDim.x) {
        float sum = 0;
        for (int w = 0; w < kWarps; ++w) sum += sums[2 * w * heads.size + c];
        partial[int64_t(blockIdx.x) * 2 * heads.size + c] = sum;
    }
}

Heads heads_of(const Tensor& qkv, const Tensor& weight, int64_t kv_width) {
    const int64_t D = weight.size(), k = kv_width / D;
    return {qkv.cols() / D - 2 * k, k, int(D)};
}

}  // namespace

void head_norm(Tensor& y, const Tensor& qkv, const Tensor& q_weight, const Tensor& k_weight, int64_t kv_width,
               double eps) {
    with_float(qkv.dtype(), [&](auto zero) {
        using T = decltype(zero);
        launch(head_norm_kernel<T>, {blocks_for(qkv.rows(), 1)}, y.data<T>(), qkv.data<T>(), q_weight.data<T>(),
               k_weight.data<T>(), heads_of(qkv, q_weight, kv_width), float(eps));
    });
}

void head_norm_backward(Tensor& grad, Tensor& dq_weight, Tensor& dk_weight, const Tensor& qkv, const Tensor& q_weight,
                        const Tensor& k_weight, int64_t kv_width, double eps) {
    constexpr int64_t kBlocks = 264;  // two for each multiprocessor of an H100 or H200
    const int64_t rows = qkv.rows(), D = q_weight.size(), blocks = std::min(rows, kBlocks);
    Tensor partial({blocks, 2 * D}, DType::f32, Device::cuda, Memory::workspace);
    with_float(qkv.dtype(), [&](auto zero) {
        using T = decltype(zero);
        launch(head_norm_backward_kernel<T>, {unsigned(blocks), kThreads, size_t(kWarps * 2 * D) * sizeof(float)},
               grad.data<T>(), partial.data<float>(), qkv.data<T>(), q_weight.data<T>(), k_weight.data<T>(),
               heads_of(qkv, q_weight, kv_width), rows, float(eps));
    });
    add_columns(dq_weight, partial);
    add_columns(dk_weight, partial, D);
}

}  // namespace train70b::cuda
