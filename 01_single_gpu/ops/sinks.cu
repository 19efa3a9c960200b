// sinks.h on a GPU: a warp for each row and head.
#include "01_single_gpu/core/cuda.cuh"
#include "01_single_gpu/ops/sinks.h"

namespace train70b::cuda {
namespace {

constexpr int kHeadsOfBlock = kThreads / 32;

template <class T>
__global__ void add_sinks_kernel(T* out, float* lse, const T* sinks, int64_t count, int64_t heads, int64_t width) {
    const int64_t i = int64_t(blockIdx.x) * kHeadsOfBlock + threadIdx.x / 32;
    if (i >= count) return;
    const float l = lse[i], sink = to_float(sinks[i % heads]), largest = fmaxf(l, sink);
    const float with_sink = largest + logf(expf(l - largest) + expf(sink - largest)), keep = expf(l - with_sink);
    for (int64_t d = threadIdx.x % 32; d < width; d += 32)
        out[i * width + d] = from_float<T>(to_float(out[i * width + d]) * keep);
    __syncwarp();  // all have read lse[i]
    if (threadIdx.x % 32 == 0) lse[i] = with_sink;
}

template <class T>
__global__ void sink_terms_kernel(float* terms, const T* dout, const T* out, const float* lse, const T* sinks,
                                  int64_t count, int64_t heads, int64_t width) {
    const int64_t i = int64_t(blockIdx.x) * kHeadsOfBlock + threadIdx.x / 32;
    if (i >= count) return;
    float delta = 0;
    for (int64_t d = threadIdx.x % 32; d < width; d += 32)
        delta += to_float(dout[i * width + d]) * to_float(out[i * width + d]);
    for (int offset = 16; offset > 0; offset /= 2) delta += __shfl_xor_sync(0xffffffff, delta, offset);
    if (threadIdx.x % 32 == 0) terms[i] = -expf(to_float(sinks[i % heads]) - lse[i]) * delta;
}

}  // namespace

void add_sinks(Tensor& out, Tensor& lse, const Tensor& sinks) {
    with_float(out.dtype(), [&](auto zero) {
        using T = decltype(zero);
        launch(add_sinks_kernel<T>, {blocks_for(lse.size(), kHeadsOfBlock)}, out.data<T>(), lse.data<float>(),
               sinks.data<T>(), lse.size(), lse.cols(), out.cols() / lse.cols());
    });
}

void sink_terms(Tensor& terms, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& sinks) {
    with_float(out.dtype(), [&](auto zero) {
        using T = decltype(zero);
        launch(sink_terms_kernel<T>, {blocks_for(lse.size(), kHeadsOfBlock)}, terms.data<float>(), dout.data<T>(),
               out.data<T>(), lse.data<float>(), sinks.data<T>(), lse.size(), lse.cols(), out.cols() / lse.cols());
    });
}

}  // namespace train70b::cuda
