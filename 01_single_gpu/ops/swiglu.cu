// swiglu.h on a GPU: one block per row.
#include "01_single_gpu/core/cuda.cuh"
#include "01_single_gpu/ops/swiglu.h"

namespace train70b::cuda {
namespace {

template <class T>
__global__ void swiglu_kernel(T* h, const T* gate_up, int64_t cols) {
    const T *gate = gate_up + blockIdx.x * 2 * cols, *up = gate + cols;
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float g[kPack], u[kPack];
        load(g, gate, c, cols);
        load(u, up, c, cols);
        for (int j = 0; j < kPack; ++j) g[j] = g[j] / (1.0f + expf(-g[j])) * u[j];
        store(h + blockIdx.x * cols, c, cols, g);
    }
}

template <class T>
__global__ void swiglu_backward_kernel(T* dgate_up, const T* dh, const T* gate_up, int64_t cols) {
    const T *gate = gate_up + blockIdx.x * 2 * cols, *up = gate + cols;
    T *dgate = dgate_up + blockIdx.x * 2 * cols, *dup = dgate + cols;
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float g[kPack], u[kPack], d[kPack];
        load(g, gate, c, cols);
        load(u, up, c, cols);
        load(d, dh + blockIdx.x * cols, c, cols);
        for (int j = 0; j < kPack; ++j) {
            const float s = 1.0f / (1.0f + expf(-g[j]));
            u[j] = d[j] * u[j] * s * (1.0f + g[j] * (1.0f - s));
            d[j] = d[j] * g[j] * s;
        }
        store(dgate, c, cols, u);
        store(dup, c, cols, d);
    }
}

}  // namespace

void swiglu(Tensor& h, const Tensor& gate_up) {
    with_float(h.dtype(),
               [&]<class T>(T) { launch(swiglu_kernel<T>, {blocks_for(h.rows(), 1)}, h, gate_up, h.cols()); });
}

void swiglu_backward(Tensor& dgate_up, const Tensor& dh, const Tensor& gate_up) {
    with_float(dh.dtype(), [&]<class T>(T) {
        launch(swiglu_backward_kernel<T>, {blocks_for(dh.rows(), 1)}, dgate_up, dh, gate_up, dh.cols());
    });
}

}  // namespace train70b::cuda
