// elementwise.h on a GPU: kPack elements per thread.
#include <numbers>

#include "01_single_gpu/core/cuda.cuh"
#include "01_single_gpu/core/random.h"
#include "01_single_gpu/ops/elementwise.h"

namespace train70b::cuda {

namespace {

template <class T>
__global__ void fill_kernel(T* x, int64_t n, float value) {
    float v[kPack];
    for (float& element : v) element = value;
    store(x, first_element(), n, v);
}

__global__ void fill_int_kernel(int32_t* x, int64_t n, int32_t value) {
    const int64_t i = first_element();
    for (int64_t j = i; j < min(i + kPack, n); ++j) x[j] = value;
}

template <class T>
__global__ void fill_normal_kernel(T* x, int64_t n, uint64_t key, GlobalIndex index, float std) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const uint64_t bits = random_bits(key, index.of(i));
    const double u1 = (double(bits >> 32) + 0.5) * 0x1p-32, u2 = double(bits & 0xffffffff) * 0x1p-32;
    x[i] = from_float<T>(float(std * (sqrt(-2 * log(u1)) * cos(2 * std::numbers::pi * u2))));
}

template <class To, class From>
__global__ void cast_kernel(To* to, const From* from, int64_t n) {
    const int64_t i = first_element();
    float v[kPack];
    load(v, from, i, n);
    store(to, i, n, v);
}

template <class T>
__global__ void scale_kernel(T* x, int64_t n, float factor) {
    const int64_t i = first_element();
    float v[kPack];
    load(v, x, i, n);
    for (float& element : v) element *= factor;
    store(x, i, n, v);
}

template <class S, class A, class B>
__global__ void add_kernel(S* sum, const A* a, const B* b, int64_t n) {
    const int64_t i = first_element();
    float x[kPack], y[kPack];
    load(x, a, i, n);
    load(y, b, i, n);
    for (int j = 0; j < kPack; ++j) x[j] += y[j];
    store(sum, i, n, x);
}

// blockIdx.x: one of the a * b runs of `width` units; blockIdx.y: a part of that run.
template <class Unit>
__global__ void swap_blocks_kernel(Unit* to, const Unit* from, int64_t a, int64_t b, int64_t width) {
    const int64_t i = blockIdx.x, target = i % b * a + i / b;
    for (int64_t w = int64_t(blockIdx.y) * blockDim.x + threadIdx.x; w < width; w += int64_t(gridDim.y) * blockDim.x)
        to[target * width + w] = from[i * width + w];
}

constexpr int kPartials = 1024;  // at most so many blocks sum in the first stage

template <class T>
__global__ void sum_squares_kernel(double* partial, const T* x, int64_t n) {
    double sum = 0;
    for (int64_t i = first_element(); i < n; i += int64_t(gridDim.x) * blockDim.x * kPack) {
        float v[kPack];
        load(v, x, i, n);
        for (float element : v) sum += double(element) * double(element);
    }
    sum = block_reduce(sum, Sum());
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void sum_partials_kernel(double* out, const double* partial, int count) {
    double sum = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) sum += partial[i];
    sum = block_reduce(sum, Sum());
    if (threadIdx.x == 0) *out = sum;
}

}  // namespace

void fill(Tensor& x, double value) {
    const int64_t n = x.size();
    if (value == 0 || x.dtype() == DType::u8)  // all dtypes: a zero is bytes of 0
        CUDA_CHECK(cudaMemsetAsync(x.raw(), int(value), size_t(x.bytes()), stream()));
    else if (x.dtype() == DType::i32)
        launch(fill_int_kernel, {blocks_for(n)}, x, n, int32_t(value));
    else
        with_float(x.dtype(), [&]<class T>(T) { launch(fill_kernel<T>, {blocks_for(n)}, x, n, float(value)); });
}

void fill_normal(Tensor& x, uint64_t key, const GlobalIndex& index, float std) {
    with_float(x.dtype(), [&]<class T>(T) {
        launch(fill_normal_kernel<T>, {blocks_for(x.size(), kThreads)}, x, x.size(), key, index, std);
    });
}

void copy(Tensor& to, const Tensor& from) {
    if (to.dtype() == from.dtype()) return cuda_copy(to.raw(), from.raw(), from.bytes(), CopyKind::within);
    with_float(to.dtype(), from.dtype(), [&]<class To, class From>(To, From) {
        launch(cast_kernel<To, From>, {blocks_for(to.size())}, to, from, to.size());
    });
}

void scale(Tensor& x, double factor) {
    with_float(x.dtype(),
               [&]<class T>(T) { launch(scale_kernel<T>, {blocks_for(x.size())}, x, x.size(), float(factor)); });
}

void add(Tensor& sum, const Tensor& a, const Tensor& b) {
    with_float(sum.dtype(), [&]<class S>(S) {
        with_float(a.dtype(), b.dtype(), [&]<class A, class B>(A, B) {
            launch(add_kernel<S, A, B>, {blocks_for(sum.size())}, sum, a, b, sum.size());
        });
    });
}

void swap_blocks(Tensor& to, const Tensor& from, int64_t a, int64_t b) {
    const int64_t width = from.bytes() / std::max<int64_t>(a * b, 1);
    const bool aligned = width % 16 == 0 && reinterpret_cast<uintptr_t>(to.raw()) % 16 == 0 &&
                         reinterpret_cast<uintptr_t>(from.raw()) % 16 == 0;
    const int64_t units = aligned ? width / 16 : width;
    const dim3 blocks(static_cast<unsigned>(a * b),
                      static_cast<unsigned>(std::clamp<int64_t>(units / (4 * kThreads), 1, 1024)));
    if (aligned)
        launch(swap_blocks_kernel<uint4>, {blocks}, to, from, a, b, units);
    else
        launch(swap_blocks_kernel<char>, {blocks}, to, from, a, b, units);
}

void sum_squares(Tensor& out, const Tensor& x) {
    Tensor partial({kPartials}, DType::f64, Device::cuda, Memory::workspace);
    const unsigned blocks = std::min<unsigned>(blocks_for(x.size()), kPartials);
    double* sums = partial.data<double>();
    with_float(x.dtype(), [&]<class T>(T) { launch(sum_squares_kernel<T>, {blocks}, sums, x, x.size()); });
    launch(sum_partials_kernel, {1}, out, sums, int(blocks));
}

}  // namespace train70b::cuda
