#pragma once
// CUDA's language on the CPU: what the .cu files see, once transform.py has made C++ of them, instead of nvcc's
// built-ins. Types and prototypes are those of NVIDIA's headers.
#include <cuda_runtime_api.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <source_location>
#include <string>
#include <tuple>
#include <type_traits>

// Of the emulator's own code: its accesses are not those of a CUDA thread (access.cpp).
#define EMULATE_UNCHECKED __attribute__((no_sanitize("thread")))

namespace emulate {

using Where = std::source_location;

struct Index {
    unsigned x = 0, y = 0, z = 0;
};
struct Position {
    Index thread, block, block_dim, grid_dim;
};
extern Position at;  // of the CUDA thread that runs

// ---- launches: transform.py makes kernel<<<grid, block, shared, stream>>>(args) a call of launch() ----
struct Extent {
    int64_t x = 1, y = 1, z = 1;
    Extent(dim3 d) : x(d.x), y(d.y), z(d.z) {}
    template <class Integer, class = std::enable_if_t<std::is_integral_v<Integer>>>
    Extent(Integer n) : x(int64_t(n)) {}
    int64_t count() const { return x * y * z; }
};
struct Launch {
    const void* kernel;
    Extent grid, block;
    size_t shared;  // bytes of dynamic shared memory
    std::shared_ptr<void> arguments;
    size_t argument_bytes;
    void (*call)(void* arguments);  // runs one thread
    size_t shared_limit = 0;        // bytes, static arrays too
};
void enqueue_launch(cudaStream_t stream, Launch launch);
void launch_bound(int64_t most);  // faults if the block has more threads: in the place of __launch_bounds__(most)

template <class... Parameters>
void launch(void (*kernel)(Parameters...), Extent grid, Extent block, size_t shared, cudaStream_t stream,
            const std::type_identity_t<Parameters>&... values) {
    using Arguments = std::tuple<void (*)(Parameters...), Parameters...>;
    static_assert((std::is_trivially_copyable_v<Parameters> && ...), "kernel arguments are copied as bytes");
    static_assert((sizeof(Parameters) + ... + 0) <= 4096, "kernel arguments take at most 4 KiB");
    const auto call = [](void* arguments) {
        std::apply([](auto body, const auto&... each) { body(each...); }, *static_cast<Arguments*>(arguments));
    };
    enqueue_launch(stream, {reinterpret_cast<const void*>(kernel), grid, block, shared,
                            std::make_shared<Arguments>(kernel, values...), sizeof(Arguments), call});
}

// ---- shared memory ----
extern uint64_t block_serial;  // another one for every block of every launch
void* static_shared(size_t bytes, size_t alignment);
void* dynamic_shared(size_t alignment);

// __shared__ T name: one per block, made by the first of its threads that comes by.
template <class T>
class Shared {
  public:
    EMULATE_UNCHECKED T& of_this_block() {
        if (serial_ != block_serial) {
            serial_ = block_serial;
            address_ = static_shared(sizeof(T), alignof(T));
        }
        return *static_cast<T*>(address_);
    }

  private:
    uint64_t serial_ = 0;
    void* address_ = nullptr;
};

// ---- synchronization and exchange within a block or a warp ----
int barrier(int predicate, Where where);  // returns whether any thread's predicate is true
// All lanes of a warp meet; each gives `bytes` <= 64 bytes. Returns the 32 values, 64 bytes apart, valid until this
// lane's next but one call.
const char* warp_exchange(unsigned mask, const void* mine, size_t bytes, const char* operation, Where where);
void warp_barrier(unsigned mask, Where where);
int lane();

template <class T>
EMULATE_UNCHECKED T from_lane(unsigned mask, T value, int source, const char* operation, Where where) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    T result;
    std::memcpy(&result, warp_exchange(mask, &value, sizeof value, operation, where) + 64 * source, sizeof result);
    return result;
}

void atomic_access(const void* p, size_t bytes);  // another thread may come before it

// ---- PTX ----
uint32_t shared_address(const void* p, Where where);
void ldmatrix_x4(bool transposed, uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t address,
                 Where where);
void mma_m16n8k16_bf16(float& c0, float& c1, float& c2, float& c3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                       uint32_t b0, uint32_t b1, Where where);
void ex2_approx_ftz(float& y, float x, Where where);
// 4, 8 or 16 bytes to shared memory, of which the first `size` are copied and the rest 0. They arrive with the thread's
// cp_async_wait_all; before, nobody may touch their place.
void cp_async(int bytes, uint32_t to, const void* from, int size, Where where);
void cp_async_wait_all(Where where);

// ---- mathematical functions: transform.py puts these in the place of those that CUDA rounds less well ----
// The result moved by up to `most` units in the last place, the bound of CUDA's documentation, as EMULATE_ULP says.
float off(float exact, int most);
double off(double exact, int most);
inline float expf(float x) { return off(std::exp(x), 2); }
inline float exp2f(float x) { return off(std::exp2(x), 2); }
inline float logf(float x) { return off(std::log(x), 1); }
inline float rsqrtf(float x) { return off(float(1 / std::sqrt(double(x))), 2); }
inline float sinf(float x) { return off(std::sin(x), 2); }
inline float cosf(float x) { return off(std::cos(x), 2); }
inline void sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
inline double log(double x) { return off(std::log(x), 1); }
inline double cos(double x) { return off(std::cos(x), 2); }
inline double sin(double x) { return off(std::sin(x), 2); }
inline void sincos(double x, double* s, double* c) { *s = sin(x), *c = cos(x); }
inline void sincospi(double x, double* s, double* c) {
    sincos(3.141592653589793 * std::remainder(x, 2.0), s, c);  // the remainder is exact
}

cudaError_t allow_shared(const void* kernel, int bytes);

}  // namespace emulate

#define threadIdx (emulate::at.thread)
#define blockIdx (emulate::at.block)
#define blockDim (emulate::at.block_dim)
#define gridDim (emulate::at.grid_dim)

inline void __syncthreads(emulate::Where w = emulate::Where::current()) { emulate::barrier(0, w); }
inline int __syncthreads_or(int p, emulate::Where w = emulate::Where::current()) { return emulate::barrier(p, w); }
inline void __syncwarp(unsigned mask = ~0u, emulate::Where w = emulate::Where::current()) {
    emulate::warp_barrier(mask, w);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source, emulate::Where w = emulate::Where::current()) {
    return emulate::from_lane(mask, value, source & 31, "__shfl_sync", w);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int other, emulate::Where w = emulate::Where::current()) {
    return emulate::from_lane(mask, value, emulate::lane() ^ other, "__shfl_xor_sync", w);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int by, emulate::Where w = emulate::Where::current()) {
    const int source = emulate::lane() + by;
    return emulate::from_lane(mask, value, source < 32 ? source : emulate::lane(), "__shfl_down_sync", w);
}
EMULATE_UNCHECKED inline unsigned __ballot_sync(unsigned mask, int predicate,
                                                emulate::Where w = emulate::Where::current()) {
    const auto* values = emulate::warp_exchange(mask, &predicate, sizeof predicate, "__ballot_sync", w);
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) {
        int vote = 0;
        if (mask >> lane & 1) std::memcpy(&vote, values + 64 * lane, sizeof vote);
        votes |= unsigned(vote != 0) << lane;
    }
    return votes;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline size_t __cvta_generic_to_shared(const void* p, emulate::Where w = emulate::Where::current()) {
    return emulate::shared_address(p, w);
}

template <class T>
EMULATE_UNCHECKED T atomicMax(T* p, T value) {
    emulate::atomic_access(p, sizeof(T));
    const T old = *p;
    if (value > old) *p = value;
    return old;
}
template <class T>
EMULATE_UNCHECKED T atomicAdd(T* p, T value) {
    emulate::atomic_access(p, sizeof(T));
    const T old = *p;
    *p = old + value;
    return old;
}

template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
constexpr auto max(A a, B b) {
    using C = std::common_type_t<A, B>;
    return C(a) < C(b) ? C(b) : C(a);
}
template <class A, class B, class = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B>>>
constexpr auto min(A a, B b) {
    using C = std::common_type_t<A, B>;
    return C(b) < C(a) ? C(b) : C(a);
}
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
using std::isfinite;
using std::isinf;
using std::isnan;

// nvcc's C++ forms of the C functions
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaErrorInvalidValue;
    return emulate::allow_shared(reinterpret_cast<const void*>(kernel), value);
}
template <class T>
cudaError_t cudaMallocAsync(T** p, size_t bytes, cudaStream_t stream) {
    return ::cudaMallocAsync(reinterpret_cast<void**>(p), bytes, stream);
}
template <class T>
cudaError_t cudaMallocHost(T** p, size_t bytes) {
    return ::cudaMallocHost(reinterpret_cast<void**>(p), bytes);
}
