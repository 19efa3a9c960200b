// rmsnorm.h on a GPU: one block per row. The second pass over a row finds it in the cache. Of heads: one warp per head,
// whose lanes hold every 32nd of its elements.
#include "01_single_gpu/ops/attention_shape.h"
#include "01_single_gpu/ops/column_sums.cuh"
#include "01_single_gpu/ops/rmsnorm.h"

namespace train70b::cuda {
namespace {

// y = x * inv * weight for one row.
template <class T>
__device__ void norm_row(T* y, const T* x, const T* weight, float inv, int64_t cols) {
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float v[kPack], w[kPack];
        load(v, x, c, cols);
        load(w, weight, c, cols);
        for (int j = 0; j < kPack; ++j) v[j] = v[j] * inv * w[j];
        store(y, c, cols, v);
    }
}

// fused_add: stores sum = a + b and normalises it. Otherwise normalises a.
template <class T, bool fused_add>
__global__ void rmsnorm_kernel(T* sum, T* y, float* inv_rms, const T* a, const T* b, const T* weight, float eps,
                               int64_t cols) {
    const int64_t row = blockIdx.x * cols;
    float squares = 0;
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float v[kPack];
        load(v, a + row, c, cols);
        if constexpr (fused_add) {
            float w[kPack];
            load(w, b + row, c, cols);
            for (int j = 0; j < kPack; ++j) v[j] = to_float(from_float<T>(v[j] + w[j]));  // as it will be read again
            store(sum + row, c, cols, v);
        }
        for (float element : v) squares += element * element;
    }
    const float inv = rsqrtf(block_reduce(squares, Sum()) / float(cols) + eps);
    if (threadIdx.x == 0) inv_rms[blockIdx.x] = inv;
    // Each thread re-reads the columns that it wrote itself.
    norm_row(y + row, (fused_add ? sum : a) + row, weight, inv, cols);
}

template <class T>
__global__ void rmsnorm_recompute_kernel(T* y, const T* x, const float* inv_rms, const T* weight, int64_t cols) {
    const int64_t row = blockIdx.x * cols;
    norm_row(y + row, x + row, weight, inv_rms[blockIdx.x], cols);
}

// Each block loops over its rows, writes their dx and sums its part of dweight in shared memory, to be written to its
// row of partial (gridDim.x, cols) fp32.
template <class T, bool wide>
__global__ void rmsnorm_backward_kernel(T* dx, float* partial, const T* dy, const T* x, const float* inv_rms,
                                        const T* weight, int64_t rows, int64_t cols) {
    extern __shared__ float4 shared[];  // float4: aligned for wide accesses
    float* block_sums = reinterpret_cast<float*>(shared);
    for (int64_t c = threadIdx.x; c < cols; c += blockDim.x)
        block_sums[c] = 0;  // block_reduce's barriers lie before its use
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        const float inv = inv_rms[r];
        float dot = 0;
        for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
            float d[kPack], v[kPack], w[kPack];
            load<wide>(d, dy + r * cols, c, cols);
            load<wide>(v, x + r * cols, c, cols);
            load<wide>(w, weight, c, cols);
            for (int j = 0; j < kPack; ++j) dot += d[j] * w[j] * v[j];
        }
        const float mean = block_reduce(dot, Sum()) * inv * inv / float(cols);
        for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
            float d[kPack], v[kPack], w[kPack], sum[kPack];
            load<wide>(d, dy + r * cols, c, cols);
            load<wide>(v, x + r * cols, c, cols);
            load<wide>(w, weight, c, cols);
            load<wide>(sum, block_sums, c, cols);
            for (int j = 0; j < kPack; ++j) {
                sum[j] += d[j] * v[j] * inv;
                v[j] = inv * (d[j] * w[j] - v[j] * mean);
            }
            store<wide>(block_sums, c, cols, sum);
            store<wide>(dx + r * cols, c, cols, v);
        }
    }
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float sum[kPack];  // this thread's own columns: no barrier needed
        load<wide>(sum, block_sums, c, cols);
        store<wide>(partial + blockIdx.x * cols, c, cols, sum);
    }
}

// ---- of each head ----
constexpr int kWarps = kThreads / 32, kPerLane = kMaxHeadDim / 32;

struct Heads {
    int64_t q, k;  // H, K
    int size;      // D
};

template <class T>
__device__ float inv_rms_of(const T* x, int size, float eps) {
    float squares = 0;
    for (int d = threadIdx.x % 32; d < size; d += 32) squares += to_float(x[d]) * to_float(x[d]);
    return rsqrtf(warp_reduce(squares, Sum()) / float(size) + eps);
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
            const float mean = warp_reduce(dot, Sum()) * inv * inv / float(heads.size);
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

void rmsnorm(Tensor& y, Tensor& inv_rms, const Tensor& x, const Tensor& weight, double eps) {
    with_float(x.dtype(), [&]<class T>(T) {
        launch(rmsnorm_kernel<T, false>, {blocks_for(x.rows(), 1)}, nullptr, y, inv_rms, x, nullptr, weight, float(eps),
               x.cols());
    });
}

void add_rmsnorm(Tensor& sum, Tensor& y, Tensor& inv_rms, const Tensor& a, const Tensor& b, const Tensor& weight,
                 double eps) {
    with_float(a.dtype(), [&]<class T>(T) {
        launch(rmsnorm_kernel<T, true>, {blocks_for(a.rows(), 1)}, sum, y, inv_rms, a, b, weight, float(eps), a.cols());
    });
}

void rmsnorm_recompute(Tensor& y, const Tensor& x, const Tensor& inv_rms, const Tensor& weight) {
    with_float(x.dtype(), [&]<class T>(T) {
        launch(rmsnorm_recompute_kernel<T>, {blocks_for(x.rows(), 1)}, y, x, inv_rms, weight, x.cols());
    });
}

void rmsnorm_backward(Tensor& dx, Tensor& dweight, const Tensor& dy, const Tensor& x, const Tensor& inv_rms,
                      const Tensor& weight) {
    constexpr int64_t kBlocks = 528;  // four for each multiprocessor of an H100 or H200
    const int64_t rows = x.rows(), cols = x.cols(), blocks = std::min(rows, kBlocks);
    Tensor partial({blocks, cols}, DType::f32, Device::cuda, Memory::workspace);
    with_float(x.dtype(), [&]<class T>(T) {
        const bool wide = in_packs({&dx, &dy, &x, &weight});
        launch(wide ? rmsnorm_backward_kernel<T, true> : rmsnorm_backward_kernel<T, false>,
               {unsigned(blocks), kThreads, cols * sizeof(float)}, dx, partial, dy, x, inv_rms, weight, rows, cols);
    });
    add_columns(dweight, partial);
}

void head_norm(Tensor& y, const Tensor& qkv, const Tensor& q_weight, const Tensor& k_weight, int64_t kv_width,
               double eps) {
    with_float(qkv.dtype(), [&]<class T>(T) {
        launch(head_norm_kernel<T>, {blocks_for(qkv.rows(), 1)}, y, qkv, q_weight, k_weight,
               heads_of(qkv, q_weight, kv_width), float(eps));
    });
}

void head_norm_backward(Tensor& grad, Tensor& dq_weight, Tensor& dk_weight, const Tensor& qkv, const Tensor& q_weight,
                        const Tensor& k_weight, int64_t kv_width, double eps) {
    constexpr int64_t kBlocks = 264;  // two for each multiprocessor of an H100 or H200
    const int64_t rows = qkv.rows(), D = q_weight.size(), blocks = std::min(rows, kBlocks);
    Tensor partial({blocks, 2 * D}, DType::f32, Device::cuda, Memory::workspace);
    with_float(qkv.dtype(), [&]<class T>(T) {
        launch(head_norm_backward_kernel<T>, {unsigned(blocks), kThreads, size_t(kWarps * 2 * D) * sizeof(float)}, grad,
               partial, qkv, q_weight, k_weight, heads_of(qkv, q_weight, kv_width), rows, float(eps));
    });
    add_columns(dq_weight, partial);
    add_columns(dk_weight, partial, D);
}

}  // namespace train70b::cuda
