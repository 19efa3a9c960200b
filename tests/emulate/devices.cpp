// The runtime API's calls about GPUs, and errors.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "internal.h"

namespace emulate {

static thread_local cudaError_t last_error = cudaSuccess;

cudaError_t error(cudaError_t code) { return last_error = code; }
cudaError_t error(cudaError_t code, const std::string& what) {
    refuse(what);
    return error(code);
}

}  // namespace emulate

using namespace emulate;

int emulate::number(const char* name, const std::string& otherwise, int least) {
    const std::string text = setting(name, otherwise.c_str());
    const int value = std::atoi(text.c_str());
    if (std::to_string(value) != text || value < least) fault(std::string(name) + "=" + text + ": not such a number");
    return value;
}

namespace {
int driver() { return number("EMULATE_DRIVER", std::to_string(CUDART_VERSION), 1000); }
}  // namespace

int emulate::capability() { return number("EMULATE_CAPABILITY", "90", 10); }

int emulate::multiprocessors() { return number("EMULATE_MULTIPROCESSORS", "132", 1); }
int emulate::shared_limit() {
    const int gpu = capability(), kib = gpu == 80 || gpu == 87 ? 163 : gpu >= 90 && gpu < 120 ? 227 : 99;
    return kib << 10;
}
void emulate::create_context() {
    static const bool created = [] {
        std::this_thread::sleep_for(std::chrono::seconds(number("EMULATE_START_S", "0", 0)));
        return true;
    }();
    (void)created;
}

extern "C" {

cudaError_t CUDARTAPI cudaGetDeviceCount(int* count) {
    *count = gpu_count();
    if (driver() < CUDART_VERSION / 1000 * 1000) return cudaErrorInsufficientDriver;
    return *count > 0 ? cudaSuccess : cudaErrorNoDevice;
}
cudaError_t CUDARTAPI cudaGetDevice(int* gpu) { return *gpu = current_gpu, cudaSuccess; }
cudaError_t CUDARTAPI cudaSetDevice(int gpu) {
    if (gpu < 0 || gpu >= gpu_count())
        return error(cudaErrorInvalidDevice, "cudaSetDevice: no GPU " + std::to_string(gpu));
    create_context();
    current_gpu = gpu;
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceGetPCIBusId(char* id, int length, int gpu) {
    std::snprintf(id, size_t(length), "0000:%02x:00.0", number("EMULATE_FIRST_GPU", "0", 0) + gpu + 1);
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {};
    std::strcpy(properties->name, "NVIDIA H200 (emulated)");
    properties->totalGlobalMem = kArena;
    properties->multiProcessorCount = multiprocessors();
    properties->major = capability() / 10;
    properties->minor = capability() % 10;
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
    switch (which) {
        case cudaDevAttrComputeCapabilityMajor: return *value = capability() / 10, cudaSuccess;
        case cudaDevAttrComputeCapabilityMinor: return *value = capability() % 10, cudaSuccess;
        case cudaDevAttrMultiProcessorCount: return *value = multiprocessors(), cudaSuccess;
        default: return error(cudaErrorInvalidValue, "cudaDeviceGetAttribute: an attribute that the emulator lacks");
    }
}
cudaError_t CUDARTAPI cudaMemGetInfo(size_t* free, size_t* total) {
    *total = kArena;
    *free = *total - device_bytes() - kContext;
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDriverGetVersion(int* version) { return *version = driver(), cudaSuccess; }
cudaError_t CUDARTAPI cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t CUDARTAPI cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t CUDARTAPI cudaPeekAtLastError() { return last_error; }
const char* CUDARTAPI cudaGetErrorString(cudaError_t code) {
    switch (code) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
        case cudaErrorInvalidDevice: return "invalid device ordinal";
        case cudaErrorInvalidResourceHandle: return "invalid resource handle";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorNoDevice: return "no CUDA-capable device is detected";
        case cudaErrorNotReady: return "device not ready";
        default: return "an error";
    }
}
cudaError_t CUDARTAPI cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
    static char only = 0;
    return *pool = reinterpret_cast<cudaMemPool_t>(&only), cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr which, void* value) {
    if (which != cudaMemPoolAttrReservedMemCurrent)
        return error(cudaErrorInvalidValue, "cudaMemPoolGetAttribute: an attribute that the emulator lacks");
    return *static_cast<uint64_t*>(value) = device_bytes(), cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }
cudaError_t CUDARTAPI cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    return *least = 0, *greatest = -5, cudaSuccess;
}

}  // extern "C"
