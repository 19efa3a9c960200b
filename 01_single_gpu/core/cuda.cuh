#pragma once
// Shared by the CUDA kernels: error checks, the stream, 16-byte accesses, reductions in a fixed order. Sums use no
// float atomics, so runs are bitwise reproducible. The counterpart of cpu.h.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <initializer_list>
#include <type_traits>

#include "01_single_gpu/core/cuda_device.h"
#include "01_single_gpu/core/tensor.h"

#define CUDA_CHECK(call)                                                              \
    do {                                                                              \
        const cudaError_t cuda_status = (call);                                       \
        CHECK(cuda_status == cudaSuccess, "{}", train70b::cuda_failure(cuda_status)); \
    } while (0)

namespace train70b::cuda {

inline cudaStream_t stream() { return static_cast<cudaStream_t>(cuda_compute_stream()); }

// Calls body with a value of the element type, as the CPU's with_float does: [&]<class T>(T) { ... }
template <class Body>
void with_float(DType dtype, Body&& body) {
    if (dtype == DType::f32)
        body(float{});
    else if (dtype == DType::bf16)
        body(__nv_bfloat16{});
    else
        CHECK(false, "no CUDA kernel for {}", name_of(dtype));
}
template <class Body>
void with_float(DType first, DType second, Body&& body) {  // with a value of each type
    with_float(first, [&](auto a) { with_float(second, [&](auto b) { body(a, b); }); });
}

// ---- 8 elements at a time: one 16-byte access of bf16, two of fp32 ----
constexpr int kPack = 8;

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
__device__ inline T from_float(float x) {
    if constexpr (sizeof(T) == 2)
        return __float2bfloat16_rn(x);
    else
        return x;
}

template <class T>
struct alignas(16) Pack {
    T value[kPack];
};

// Loads elements [i, i + kPack) of p as fp32; elements from `end` on are 0. One wide access if possible; with `wide`,
// which promises that it is (see in_packs), there is no branch, and several loads are in flight at the same time.
template <bool wide = false, class T>
__device__ inline void load(float (&x)[kPack], const T* p, int64_t i, int64_t end) {
    if (wide || (i + kPack <= end && reinterpret_cast<uintptr_t>(p + i) % 16 == 0)) {
        const Pack<T> pack = *reinterpret_cast<const Pack<T>*>(p + i);
#pragma unroll
        for (int j = 0; j < kPack; ++j) x[j] = to_float(pack.value[j]);
    } else {
#pragma unroll
        for (int j = 0; j < kPack; ++j) x[j] = i + j < end ? to_float(p[i + j]) : 0.0f;
    }
}

template <bool wide = false, class T>
__device__ inline void store(T* p, int64_t i, int64_t end, const float (&x)[kPack]) {
    if (wide || (i + kPack <= end && reinterpret_cast<uintptr_t>(p + i) % 16 == 0)) {
        Pack<T> pack;
#pragma unroll
        for (int j = 0; j < kPack; ++j) pack.value[j] = from_float<T>(x[j]);
        *reinterpret_cast<Pack<T>*>(p + i) = pack;
    } else {
#pragma unroll
        for (int j = 0; j < kPack; ++j)
            if (i + j < end) p[i + j] = from_float<T>(x[j]);
    }
}

// Whether every row of these can be accessed in packs, by load<true> and store<true>.
inline bool in_packs(std::initializer_list<const Tensor*> list) {
    return std::all_of(list.begin(), list.end(), [](const Tensor* x) {
        return x->cols() % kPack == 0 && reinterpret_cast<uintptr_t>(x->raw()) % 16 == 0;
    });
}

// ---- launches ----
constexpr int kThreads = 256;

// This thread's first element in a kernel over n elements, kPack per thread.
__device__ inline int64_t first_element() { return (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * kPack; }
// The blocks that n elements, rows, ... need at so many per block; none for none.
inline unsigned blocks_for(int64_t n, int64_t per_block = int64_t(kThreads) * kPack) {
    return static_cast<unsigned>((n + per_block - 1) / per_block);
}

struct Grid {
    dim3 blocks;
    unsigned threads = kThreads;
    size_t shared_bytes = 0;  // dynamic shared memory of a block
};

// A tensor that may be empty: null for the kernel then.
struct OrNull {
    const Tensor& tensor;
};

// An argument as the kernel's parameter: of a tensor the pointer to its data.
template <class Parameter, class Argument>
Parameter parameter_of(const Argument& argument) {
    if constexpr (std::is_same_v<Argument, Tensor>)
        return argument.template data<std::remove_pointer_t<Parameter>>();
    else if constexpr (std::is_same_v<Argument, OrNull>)
        return argument.tensor ? parameter_of<Parameter>(argument.tensor) : nullptr;
    else
        return argument;
}

// Launches a kernel on the compute stream. A grid without blocks, as for a tensor without rows, launches nothing: CUDA
// refuses it as invalid. So no op needs a case of its own for empty tensors.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const Grid& grid, const Arguments&... arguments) {
    if (grid.blocks.x == 0 || grid.blocks.y == 0 || grid.blocks.z == 0) return;
    // More than 48 KiB of shared memory must be requested; 1 KiB of the 48 is reserved for a kernel's static arrays.
    if (grid.shared_bytes > 47 << 10)
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(grid.shared_bytes)));
    kernel<<<grid.blocks, grid.threads, grid.shared_bytes, stream()>>>(parameter_of<Parameters>(arguments)...);
    CUDA_CHECK(cudaGetLastError());
}

// ---- reductions over a warp, and over a block by way of its warps; the order never changes ----
struct Sum {
    template <class V>
    __device__ V operator()(V a, V b) const {
        return a + b;
    }
};
struct Max {
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <class V, class Combine>
__device__ V warp_reduce(V value, Combine combine) {  // every lane gets the result
    for (int offset = 16; offset > 0; offset /= 2) value = combine(value, __shfl_xor_sync(~0u, value, offset));
    return value;
}

// Every thread gets the result. blockDim.x is a multiple of 32, at most 1024.
template <class V, class Combine>
__device__ V block_reduce(V value, Combine combine) {
    __shared__ V warps[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = blockDim.x / 32;
    value = warp_reduce(value, combine);
    __syncthreads();  // the previous call may still read the array
    if (lane == 0) warps[warp] = value;
    __syncthreads();
    value = warps[0];
    for (int w = 1; w < count; ++w) value = combine(value, warps[w]);
    return value;
}

}  // namespace train70b::cuda
