// fill_normal.h on a GPU: one element per thread.
#include <numbers>

#include "01_single_gpu/core/cuda.cuh"
#include "01_single_gpu/core/random.h"
#include "01_single_gpu/ops/fill_normal.h"

namespace train70b::cuda {
namespace {

template <class T>
__global__ void fill_normal_kernel(T* x, int64_t n, uint64_t key, GlobalIndex index, float std) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const uint64_t bits = random_bits(key, index.of(i));
    const double u1 = (double(bits >> 32) + 0.5) * 0x1p-32, u2 = double(bits & 0xffffffff) * 0x1p-32;
    x[i] = from_float<T>(float(std * (sqrt(-2 * log(u1)) * cos(2 * std::numbers::pi * u2))));
}

}  // namespace

void fill_normal(Tensor& x, uint64_t key, const GlobalIndex& index, float std) {
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        launch(fill_normal_kernel<T>, {blocks_for(x.size(), kThreads)}, x.data<T>(), x.size(), key, index, std);
    });
}

}  // namespace train70b::cuda
