#include <cublasLt.h>

#include <cstring>
#include <stdexcept>
#include <utility>

#include "01_single_gpu/core/cuda.cuh"
#include "01_single_gpu/core/gpu_support.h"

namespace train70b {

static int current_device() {
    int device = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    return device;
}

static cudaMemPool_t default_pool() {
    cudaMemPool_t pool = nullptr;
    CUDA_CHECK(cudaDeviceGetDefaultMemPool(&pool, current_device()));
    return pool;
}

std::pair<int, int> cuda_compute_capability() {
    int major = 0, minor = 0;
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, current_device()));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, current_device()));
    return {major, minor};
}

std::string why_no_cuda() {
    static const std::string reason = [] {
        int driver = 0, count = 0;
        if (cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0)  // 0: there is none
            if (const std::string old = driver_too_old(driver, CUDART_VERSION); !old.empty()) return old;
        const cudaError_t status = cudaGetDeviceCount(&count);
        if (status != cudaSuccess) return std::string("no usable GPU or driver (") + cudaGetErrorString(status) + ")";
        if (count == 0) return std::string("no GPU in this machine");
        const auto [major, minor] = cuda_compute_capability();
        return no_code_for(TRAIN70B_ARCHITECTURES, major, minor);
    }();
    return reason;
}

namespace {

struct Context {
    static inline bool exists = false;
    cudaStream_t stream = nullptr;
    int scopes = 0;  // CudaStreamScope
    Context() {
        exists = true;
        if (!why_no_cuda().empty()) usage_error("--device cuda: {} (try --device cpu)", why_no_cuda());
        CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        // Keep freed memory in the pool: returning it to the driver synchronizes the device.
        const cudaMemPool_t pool = default_pool();
        uint64_t keep = UINT64_MAX;
        CUDA_CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
        // One compute stream frees and allocates in one order; reuse that depends on timing would not be reproducible.
        int off = 0;
        CUDA_CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolReuseAllowInternalDependencies, &off));
        CUDA_CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolReuseAllowOpportunistic, &off));
    }
};

Context& context() {
    static Context* instance = new Context();  // never destroyed: tensors in static storage may outlive main
    return *instance;
}

}  // namespace

void* cuda_allocate(int64_t bytes) {
    void* pointer = nullptr;
    const cudaError_t status = cudaMallocAsync(&pointer, std::max<int64_t>(bytes, 1), context().stream);
    if (status == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        size_t free = 0, total = 0;
        cudaMemGetInfo(&free, &total);
        throw std::runtime_error(describe(
            "out of GPU memory: {} bytes wanted, {} of {} free (try a smaller --micro-batch or --recompute full)",
            bytes, free, total));
    }
    CUDA_CHECK(status);
#ifdef TRAIN70B_POISON
    CUDA_CHECK(cudaMemsetAsync(pointer, 0xff, bytes, context().stream));
#endif
    return pointer;
}

void cuda_release(void* pointer) noexcept { cudaFreeAsync(pointer, context().stream); }

void cuda_copy(void* to, const void* from, int64_t bytes, CopyKind kind) {
    const cudaMemcpyKind direction = kind == CopyKind::to_device ? cudaMemcpyHostToDevice
                                     : kind == CopyKind::to_host ? cudaMemcpyDeviceToHost
                                                                 : cudaMemcpyDeviceToDevice;
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, direction, context().stream));
    if (kind != CopyKind::within) cuda_synchronize();  // the caller may reuse the host buffer
}

void cuda_upload(void* to, const void* from, int64_t bytes) {
    struct Slot {
        void* pinned = nullptr;
        int64_t bytes = 0;
        cudaEvent_t copied = nullptr;
    };
    static Slot slots[kUploads];
    static size_t uploads = 0;
    Slot& slot = slots[uploads++ % kUploads];
    if (!slot.copied) CUDA_CHECK(cudaEventCreateWithFlags(&slot.copied, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventSynchronize(slot.copied));  // of a new event: at once
    if (slot.bytes < bytes) {
        if (slot.pinned) cuda_release_host(slot.pinned);
        slot.bytes = std::max<int64_t>(bytes, 64 << 10);
        slot.pinned = cuda_allocate_host(slot.bytes);
    }
    std::memcpy(slot.pinned, from, size_t(bytes));
    CUDA_CHECK(cudaMemcpyAsync(to, slot.pinned, size_t(bytes), cudaMemcpyHostToDevice, context().stream));
    CUDA_CHECK(cudaEventRecord(slot.copied, context().stream));
}

CudaCopy::CudaCopy(void* to, const void* from, int64_t bytes, CopyKind kind) {
    static cudaStream_t streams[2] = {};  // one per direction: each has its own copy engine
    cudaStream_t& stream = streams[kind == CopyKind::to_host];
    if (!stream) CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaEvent_t event = nullptr;
    CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventRecord(event, context().stream));
    CUDA_CHECK(cudaStreamWaitEvent(stream, event, 0));
    CUDA_CHECK(cudaMemcpyAsync(to, from, bytes,
                               kind == CopyKind::to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaEventRecord(event, stream));
    arrived_ = event;
}

CudaCopy::~CudaCopy() { cudaEventDestroy(static_cast<cudaEvent_t>(arrived_)); }

void CudaCopy::host_waits() { CUDA_CHECK(cudaEventSynchronize(static_cast<cudaEvent_t>(arrived_))); }

void CudaCopy::stream_waits() {
    CUDA_CHECK(cudaStreamWaitEvent(context().stream, static_cast<cudaEvent_t>(arrived_), 0));
}

namespace {
cudaEvent_t recorded_event() {
    cudaEvent_t event = nullptr;
    CUDA_CHECK(cudaEventCreate(&event));
    CUDA_CHECK(cudaEventRecord(event, context().stream));
    return event;
}
}  // namespace

CudaTimer::CudaTimer() : begin_(recorded_event()) {}

CudaTimer::~CudaTimer() {
    for (void* event : {begin_, end_})
        if (event) cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

void CudaTimer::stop() { end_ = recorded_event(); }

double CudaTimer::seconds() const {
    float milliseconds = 0;
    CUDA_CHECK(cudaEventSynchronize(static_cast<cudaEvent_t>(end_)));
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(begin_), static_cast<cudaEvent_t>(end_)));
    return 1e-3 * milliseconds;
}

void* cuda_allocate_host(int64_t bytes) {
    void* pointer = nullptr;
    context();
    CUDA_CHECK(cudaMallocHost(&pointer, std::max<int64_t>(bytes, 1)));
    return pointer;
}

void cuda_release_host(void* pointer) noexcept { cudaFreeHost(pointer); }

void cuda_synchronize() { CUDA_CHECK(cudaStreamSynchronize(context().stream)); }

void* cuda_compute_stream() { return context().stream; }

CudaStreamScope::CudaStreamScope(void* stream)
    : outer_(std::exchange(context().stream, static_cast<cudaStream_t>(stream))) {
    ++context().scopes;
}

CudaStreamScope::~CudaStreamScope() {
    context().stream = static_cast<cudaStream_t>(outer_);
    --context().scopes;
}

bool CudaStreamScope::active() { return context().scopes > 0; }

std::string cuda_failure(int status) {
    const bool of_a_kernel = status >= cudaErrorIllegalAddress && status <= cudaErrorLaunchFailure;  // 700 to 719
    return describe("{}{}", cudaGetErrorString(cudaError_t(status)),
                    of_a_kernel ? ": an earlier kernel's (CUDA_LAUNCH_BLOCKING=1 names the call)" : "");
}

int cuda_device_count() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

std::string cuda_device_id() {
    char id[32] = {};
    CUDA_CHECK(cudaDeviceGetPCIBusId(id, sizeof id, current_device()));
    return id;
}

void cuda_use_device(int device) {
    CHECK(!Context::exists || current_device() == device, "device {} is chosen after streams and memory of device {}",
          device, current_device());
    CUDA_CHECK(cudaSetDevice(device));
}

CudaInfo cuda_info() {
    cudaDeviceProp properties{};
    CUDA_CHECK(cudaGetDeviceProperties(&properties, current_device()));
    const size_t cublas = cublasLtGetVersion();
    return {properties.name, static_cast<int64_t>(properties.totalGlobalMem), properties.multiProcessorCount,
            describe("{}.{}.{}", cublas / 10000, cublas / 100 % 100, cublas % 100)};
}

std::string cuda_versions() {
    const auto [major, minor] = cuda_compute_capability();
    return describe("compute capability {}.{}, code for {}; cuBLASLt {}; FP8: {}", major, minor, TRAIN70B_ARCHITECTURES,
                    cuda_info().cublaslt, fp8_recipes_of(major, minor));
}

DeviceMemory cuda_memory() {
    size_t free = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    uint64_t reserved = 0;
    CUDA_CHECK(cudaMemPoolGetAttribute(default_pool(), cudaMemPoolAttrReservedMemCurrent, &reserved));
    return {int64_t(total - free), int64_t(total - free) - int64_t(reserved)};
}

}  // namespace train70b
