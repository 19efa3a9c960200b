// bias.h on a GPU. The gradient: each block sums a part of the rows of 256 columns; a second kernel sums the parts.
#include "01_single_gpu/ops/bias.h"
#include "01_single_gpu/ops/column_sums.cuh"

namespace train70b::cuda {
namespace {

template <class T>
__global__ void add_bias_kernel(T* y, const T* bias, int64_t cols) {
    T* row = y + blockIdx.x * cols;
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float v[kPack], b[kPack];
        load(v, row, c, cols);
        load(b, bias, c, cols);
        for (int j = 0; j < kPack; ++j) v[j] += b[j];
        store(row, c, cols, v);
    }
}

// Row blockIdx.y of partial (gridDim.y, cols) gets the sums over rows blockIdx.y, blockIdx.y + gridDim.y, ...
template <class T>
__global__ void sum_rows_kernel(float* partial, const T* dy, int64_t rows, int64_t cols) {
    const int64_t c = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (c >= cols) return;
    float sum = 0;
    for (int64_t r = blockIdx.y; r < rows; r += gridDim.y) sum += to_float(dy[r * cols + c]);
    partial[blockIdx.y * cols + c] = sum;
}

}  // namespace

void add_bias(Tensor& y, const Tensor& bias) {
    with_float(y.dtype(),
               [&]<class T>(T) { launch(add_bias_kernel<T>, {blocks_for(y.rows(), 1)}, y, bias, y.cols()); });
}

void add_bias_backward(Tensor& dbias, const Tensor& dy) {
    constexpr int64_t kParts = 64;
    const int64_t rows = dy.rows(), cols = dy.cols(), parts = std::min(rows, kParts);
    Tensor partial({parts, cols}, DType::f32, Device::cuda, Memory::workspace);
    with_float(dy.dtype(), [&]<class T>(T) {
        launch(sum_rows_kernel<T>, {dim3(blocks_for(cols, kThreads), unsigned(parts))}, partial, dy, rows, cols);
    });
    add_columns(dbias, partial);
}

}  // namespace train70b::cuda
