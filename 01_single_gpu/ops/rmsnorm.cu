// rmsnorm.h on a GPU: one block per row. The second pass over a row finds it in the cache.
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

}  // namespace

void rmsnorm(Tensor& y, Tensor& inv_rms, const Tensor& x, const Tensor& weight, double eps) {
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        launch(rmsnorm_kernel<T, false>, {blocks_for(x.rows(), 1)}, nullptr, y.data<T>(), inv_rms.data<float>(),
               x.data<T>(), nullptr, weight.data<T>(), float(eps), x.cols());
    });
}

void add_rmsnorm(Tensor& sum, Tensor& y, Tensor& inv_rms, const Tensor& a, const Tensor& b, const Tensor& weight,
                 double eps) {
    with_float(a.dtype(), [&](auto zero) {
        using T = decltype(zero);
        launch(rmsnorm_kernel<T, true>, {blocks_for(a.rows(), 1)}, sum.data<T>(), y.data<T>(), inv_rms.data<float>(),
               a.data<T>(), b.data<T>(), weight.data<T>(), float(eps), a.cols());
    });
}

void rmsnorm_recompute(Tensor& y, const Tensor& x, const Tensor& inv_rms, const Tensor& weight) {
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        launch(rmsnorm_recompute_kernel<T>, {blocks_for(x.rows(), 1)}, y.data<T>(), x.data<T>(), inv_rms.data<float>(),
               weight.data<T>(), x.cols());
    });
}

void rmsnorm_backward(Tensor& dx, Tensor& dweight, const Tensor& dy, const Tensor& x, const Tensor& inv_rms,
                      const Tensor& weight) {
    constexpr int64_t kBlocks = 528;  // four for each multiprocessor of an H100 or H200
    const int64_t rows = x.rows(), cols = x.cols(), blocks = std::min(rows, kBlocks);
    Tensor partial({blocks, cols}, DType::f32, Device::cuda, Memory::workspace);
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const bool wide = in_packs({&dx, &dy, &x, &weight});
        launch(wide ? rmsnorm_backward_kernel<T, true> : rmsnorm_backward_kernel<T, false>,
               {unsigned(blocks), kThreads, cols * sizeof(float)}, dx.data<T>(), partial.data<float>(), dy.data<T>(),
               x.data<T>(), inv_rms.data<float>(), weight.data<T>(), rows, cols);
    });
    add_columns(dweight, partial);
}

}  // namespace train70b::cuda
