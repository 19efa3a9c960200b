#pragma once
// The CUDA runtime as the rest of the program uses it, without CUDA's headers. What cuda_absent.cpp does not define is
// defined in cuda_device.cu only and must be used under #if TRAIN70B_CUDA, which is 0 or 1 in the files that
// CMakeLists.txt lists.
#include <cstdint>
#include <string>
#include <utility>

#include "01_single_gpu/core/memory.h"

namespace train70b {

std::string why_no_cuda();  // empty if a CUDA device can be used; else the reason

// Stream-ordered memory: an allocation may be used by everything issued to the compute stream after it, and a release
// takes effect after everything issued before it.
void* cuda_allocate(int64_t bytes);  // throws std::runtime_error, which names the device's free memory
void cuda_release(void* pointer) noexcept;
// Copies between host and device or within the device, in stream order; a copy to the host is complete on return.
enum class CopyKind { to_device, to_host, within };
void cuda_copy(void* to, const void* from, int64_t bytes, CopyKind kind);
// A copy to the device in stream order, without a wait: `from` may change at once. It goes through pinned buffers, of
// which there are kUploads; the next one waits until the oldest of them has been read. For small ones, from one thread.
constexpr int kUploads = 32;
void cuda_upload(void* to, const void* from, int64_t bytes);
void* cuda_allocate_host(int64_t bytes);  // pinned: the device copies from and to it at full speed
void cuda_release_host(void* pointer) noexcept;
// An asynchronous copy between device and pinned memory on its own stream. It starts after everything issued to the
// compute stream so far. host_waits() blocks the host until it is complete, stream_waits() the compute stream.
class CudaCopy {
  public:
    CudaCopy(void* to, const void* from, int64_t bytes, CopyKind kind);
    ~CudaCopy();
    CudaCopy(const CudaCopy&) = delete;
    void host_waits();
    void stream_waits();

  private:
    void* arrived_;  // a cudaEvent_t
};
void cuda_synchronize();

// The time of what is issued to the compute stream between the construction and stop(). The host waits in seconds()
// only.
class CudaTimer {
  public:
    CudaTimer();
    ~CudaTimer();
    CudaTimer(const CudaTimer&) = delete;
    void stop();
    double seconds() const;

  private:
    void *begin_ = nullptr, *end_ = nullptr;  // each a cudaEvent_t
};
void* cuda_compute_stream();  // a cudaStream_t: all kernels and copies are issued to it

// Replaces the compute stream for the lifetime of the object. The caller must order the two streams; memory that is
// allocated or released meanwhile is ordered with the new stream.
class CudaStreamScope {
  public:
    explicit CudaStreamScope(void* stream);
    ~CudaStreamScope();
    CudaStreamScope(const CudaStreamScope&) = delete;
    static bool active();  // whether one exists

  private:
    void* outer_;
};

std::string cuda_failure(int status);  // a cudaError_t in words
int cuda_device_count();
std::pair<int, int> cuda_compute_capability();  // major and minor, of the device in use
std::string cuda_device_id();                   // PCI bus id of the device in use
// Default: device 0. Must precede the first allocation, host or device: streams belong to the device that was current
// when they were created (CHECKed).
void cuda_use_device(int device);
struct CudaInfo {
    std::string name;
    int64_t memory = 0;  // bytes
    int multiprocessors = 0;
    std::string cublaslt;  // its version: "13.1.0"
};
CudaInfo cuda_info();
std::string cuda_versions();  // of the code and of cuBLASLt, and which FP8 recipes the device has, in words
DeviceMemory cuda_memory();   // of the device in use

}  // namespace train70b
