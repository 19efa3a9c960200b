#pragma once
// The second half of a sum over rows: each block of a kernel has written the sums of its rows to one row of `partial`.
#include "01_single_gpu/core/cuda.cuh"

namespace train70b::cuda {

// out_c += the sum over the blocks of partial (blocks, stride), columns [0, cols). Each warp of a block sums every
// eighth row of 32 columns.
template <class W>
__global__ void add_columns_kernel(W* out, const float* partial, int64_t blocks, int64_t stride, int64_t cols) {
    __shared__ float sums[kThreads / 32][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t c = int64_t(blockIdx.x) * 32 + lane;
    float sum = 0;
    if (c < cols)
        for (int64_t b = warp; b < blocks; b += kThreads / 32) sum += partial[b * stride + c];
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= cols) return;
    for (int w = 1; w < kThreads / 32; ++w) sum += sums[w][lane];
    out[c] = from_float<W>(to_float(out[c]) + sum);
}

// The same for columns [begin, begin + out.size()) of partial (blocks, stride) fp32.
inline void add_columns(Tensor& out, const Tensor& partial, int64_t begin = 0) {
    with_float(out.dtype(), [&]<class W>(W) {
        launch(add_columns_kernel<W>, {blocks_for(out.size(), 32)}, out, partial.data<float>() + begin, partial.rows(),
               partial.cols(), out.size());
    });
}

}  // namespace train70b::cuda
