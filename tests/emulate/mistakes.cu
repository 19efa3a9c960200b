// Mistakes that the emulated GPU must report, each by its name on the command line (test_emulator.py: what is said).
#include <cuda_runtime.h>
#include <nccl.h>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <thread>

namespace {

constexpr int kThreads = 64;

__global__ void write_kernel(float* x, int at) {
    if (threadIdx.x == 0) x[at] = 1;
}
__global__ void wide_kernel(float* x) { *reinterpret_cast<float4*>(x + 1) = {}; }
__global__ void race_kernel(float* x) {
    __shared__ float tile[kThreads];
    tile[threadIdx.x] = float(threadIdx.x);
    x[threadIdx.x] = tile[(threadIdx.x + 1) % kThreads];
}
__global__ void tiles_race_kernel(float* x) {  // no barrier at the loop's end
    __shared__ float tile;
    for (int i = 0; i < 3; ++i) {
        if (threadIdx.x == 0) tile = float(i);
        __syncthreads();
        if (threadIdx.x == 40) x[i] = tile;
    }
}
__global__ void bytes_race_kernel(float* x) {
    __shared__ uint8_t bytes[4];
    if (threadIdx.x == 0) bytes[0] = bytes[1] = 1;
    if (threadIdx.x == 40) x[0] = float(bytes[0]);
}
__global__ void blocks_race_kernel(float* x) { x[threadIdx.x] = float(blockIdx.x); }
__global__ void shared_bound_kernel(float* x) {
    __shared__ float tile[kThreads];
    tile[threadIdx.x + 1] = 1;
    __syncthreads();
    x[threadIdx.x] = tile[threadIdx.x];
}
__global__ void divergent_kernel(float* x) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    x[threadIdx.x] = 0;
}
__global__ void divergent_warp_kernel(float* x) {
    if (threadIdx.x % 2 == 0) x[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 1);
    x[threadIdx.x] += __shfl_xor_sync(~0u, 1.0f, 2);
}
__global__ void dynamic_kernel(float* x) {
    extern __shared__ float memory[];
    x[threadIdx.x] = memory[threadIdx.x];
}
__global__ void dynamic_and_static_kernel(float* x) {
    extern __shared__ float memory[];
    __shared__ float tile[kThreads];
    tile[threadIdx.x] = memory[threadIdx.x] = x[threadIdx.x];
}
// A tile by asynchronous copies; each thread reads the next one's number.
__device__ void copy_number(float* to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(uint32_t(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(4)
                 : "memory");
}
__global__ void copy_kernel(float* x, bool waits, bool meets) {
    __shared__ float tile[kThreads];
    copy_number(tile + threadIdx.x, x + threadIdx.x);
    if (waits) asm volatile("cp.async.wait_all;" ::: "memory");
    if (meets) __syncthreads();
    const float next = tile[(threadIdx.x + 1) % kThreads];  // may be on its way
    __syncthreads();
    x[threadIdx.x] = next;
    asm volatile("cp.async.wait_all;" ::: "memory");
}
__global__ void overwriting_copy_kernel(float* x) {
    __shared__ float tile[kThreads];
    tile[threadIdx.x] = 1;
    __syncthreads();
    const float next = tile[(threadIdx.x + 1) % kThreads];
    copy_number(tile + threadIdx.x, x + threadIdx.x);  // others may still read
    asm volatile("cp.async.wait_all;" ::: "memory");
    x[threadIdx.x] = next;
}
__global__ void forgotten_copy_kernel(float* x) {
    __shared__ float tile[kThreads];
    copy_number(tile + threadIdx.x, x + threadIdx.x);  // no thread waits
}
__global__ void add_kernel(float* x) { atomicAdd(x, 1.0f); }
__global__ void __launch_bounds__(kThreads) bounded_kernel(float* x) { x[threadIdx.x] = 0; }

cudaStream_t stream() {
    static const cudaStream_t made = [] {
        cudaStream_t s = nullptr;
        cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
        return s;
    }();
    return made;
}
float* memory(size_t floats = kThreads) {
    float* x = nullptr;
    cudaMallocAsync(&x, floats * sizeof(float), stream());
    return x;
}
// Rank `rank` of two, each on a GPU: all-reduces of two communicators, in this order.
void two_all_reduces(int rank, const ncclUniqueId* ids, int first) {
    cudaSetDevice(rank);
    cudaStream_t s = nullptr;
    cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comms[2];
    for (int i = 0; i < 2; ++i) ncclCommInitRankConfig(&comms[i], 2, ids[i], rank, &config);
    float* x = nullptr;
    cudaMallocAsync(&x, sizeof(float), s);
    for (const int i : {first, 1 - first}) ncclAllReduce(x, x, 1, ncclFloat, ncclSum, comms[i], s);
    cudaStreamSynchronize(s);
}
void two_ranks(int first_of_rank_1) {
    ncclUniqueId ids[2];
    for (ncclUniqueId& id : ids) ncclGetUniqueId(&id);
    std::thread other(two_all_reduces, 1, ids, first_of_rank_1);
    two_all_reduces(0, ids, 0);
    other.join();
}
void finish() { cudaStreamSynchronize(stream()); }
float on_host[kThreads];

const std::map<std::string, std::function<void()>> kMistakes = {
    {"none",
     [] {
         float *x = memory(), sum = 0;
         cudaMemsetAsync(x, 0, kThreads * sizeof(float), stream());
         add_kernel<<<10, kThreads, 0, stream()>>>(x);
         cudaMemcpyAsync(&sum, x, sizeof sum, cudaMemcpyDeviceToHost, stream());
         std::printf("%g\n", double(sum));
     }},
    {"bound", [] { write_kernel<<<1, kThreads, 0, stream()>>>(memory(), kThreads); }},
    {"released",
     [] {
         float* x = memory();
         cudaFreeAsync(x, stream());
         write_kernel<<<1, kThreads, 0, stream()>>>(x, 0);
     }},
    {"released twice",
     [] {
         float* x = memory();
         cudaFreeAsync(x, stream());
         cudaFreeAsync(x, stream());
     }},
    {"host pointer",
     [] {
         static float* heap = new float[kThreads];
         write_kernel<<<1, kThreads, 0, stream()>>>(heap, 0);
     }},
    {"host touches",
     [] {
         float* x = memory();
         write_kernel<<<1, kThreads, 0, stream()>>>(x, 0);
         finish();
         std::printf("%g\n", double(x[0]));
     }},
    {"alignment", [] { wide_kernel<<<1, 1, 0, stream()>>>(memory()); }},
    {"race", [] { race_kernel<<<1, kThreads, 0, stream()>>>(memory()); }},
    {"race of tiles", [] { tiles_race_kernel<<<1, kThreads, 0, stream()>>>(memory()); }},
    {"race of bytes", [] { bytes_race_kernel<<<1, kThreads, 0, stream()>>>(memory()); }},
    {"race of blocks", [] { blocks_race_kernel<<<2, kThreads, 0, stream()>>>(memory()); }},
    {"shared bound", [] { shared_bound_kernel<<<1, kThreads, 0, stream()>>>(memory()); }},
    {"divergent barriers", [] { divergent_kernel<<<1, kThreads, 0, stream()>>>(memory()); }},
    {"divergent warp", [] { divergent_warp_kernel<<<1, kThreads, 0, stream()>>>(memory()); }},
    {"no dynamic memory", [] { dynamic_kernel<<<1, kThreads, 0, stream()>>>(memory()); }},
    {"shared without asking", [] { dynamic_kernel<<<1, kThreads, 64 << 10, stream()>>>(memory()); }},
    {"shared beside static arrays", [] { dynamic_and_static_kernel<<<1, kThreads, 48 << 10, stream()>>>(memory()); }},
    {"copy", [] { copy_kernel<<<1, kThreads, 0, stream()>>>(memory(), true, true); }},
    {"copy not waited for", [] { copy_kernel<<<1, kThreads, 0, stream()>>>(memory(), false, true); }},
    {"copy without barrier", [] { copy_kernel<<<1, kThreads, 0, stream()>>>(memory(), true, false); }},
    {"copy over what is read", [] { overwriting_copy_kernel<<<1, kThreads, 0, stream()>>>(memory()); }},
    {"copy forgotten", [] { forgotten_copy_kernel<<<1, kThreads, 0, stream()>>>(memory()); }},
    {"copy out of bounds", [] { copy_kernel<<<1, kThreads, 0, stream()>>>(memory(kThreads - 1), true, true); }},
    {"empty grid", [] { add_kernel<<<0, kThreads, 0, stream()>>>(memory()); }},
    {"block too large", [] { add_kernel<<<1, 2048, 0, stream()>>>(memory()); }},
    {"block too deep", [] { add_kernel<<<1, dim3(1, 1, 128), 0, stream()>>>(memory()); }},
    {"launch bound", [] { bounded_kernel<<<1, 2 * kThreads, 0, stream()>>>(memory(2 * kThreads)); }},
    {"shared memory of another GPU",
     [] { cudaFuncSetAttribute(dynamic_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 164 << 10); }},
    {"allocated on another stream",
     [] {
         cudaStream_t other = nullptr;
         cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
         for (int i = 0; i < 100; ++i) write_kernel<<<1, kThreads, 0, other>>>(memory(), 0);
     }},
    {"first collectives", [] { two_ranks(0); }},
    {"first collectives in opposite order", [] { two_ranks(1); }},
    {"default stream", [] { add_kernel<<<1, kThreads, 0, nullptr>>>(memory()); }},
    {"other GPU",
     [] {
         float* x = memory();
         cudaSetDevice(1);
         add_kernel<<<1, kThreads, 0, stream()>>>(x);
     }},
    {"copy bound", [] { cudaMemcpyAsync(on_host, memory(8), sizeof on_host, cudaMemcpyDeviceToHost, stream()); }},
    {"copy direction", [] { cudaMemcpyAsync(on_host, memory(), sizeof on_host, cudaMemcpyHostToDevice, stream()); }},
};

}  // namespace

int main(int count, char** words) {
    if (count != 2 || !kMistakes.count(words[1])) {
        for (const auto& [name, mistake] : kMistakes) std::fprintf(stderr, "%s\n", name.c_str());
        return 2;
    }
    kMistakes.at(words[1])();
    finish();
    return cudaGetLastError() == cudaSuccess ? 0 : 3;
}
