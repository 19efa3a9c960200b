#pragma once
// What the rest of the program needs of a CUDA device, without CUDA's headers. Defined in cuda_device.cu, so that all
// but why_no_cuda() belongs behind #if TRAIN70B_CUDA; that is 0 or 1 in the files that CMakeLists.txt names.
#include <cstdint>
#include <string>

namespace train70b {

std::string why_no_cuda();  // empty when a CUDA device can be used; else what is missing

// Memory in stream order: an allocation may be used by everything issued to the compute stream after it, and a release
// takes effect after everything issued before it.
void* cuda_allocate(int64_t bytes);  // throws std::bad_alloc, with the device's free memory in the message on stderr
void cuda_release(void* pointer) noexcept;
// Copies between host and device or within it, in stream order; a copy to the host has arrived when the call returns.
enum class CopyKind { to_device, to_host, within };
void cuda_copy(void* to, const void* from, int64_t bytes, CopyKind kind);
void* cuda_allocate_host(int64_t bytes);  // pinned: the device copies from and to it at full speed
void cuda_release_host(void* pointer) noexcept;
// The same between device and pinned memory, beside the compute stream: begins after what has been issued to it so far.
// Then the host waits for the copy, or what is issued to the compute stream from there on does.
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
void* cuda_compute_stream();  // a cudaStream_t: what every kernel and copy here is issued to

// Until its end, everything goes to another stream. Ordering the two is the caller's business; memory that is allocated
// or released meanwhile belongs to that stream's order.
class CudaStreamScope {
  public:
    explicit CudaStreamScope(void* stream);
    ~CudaStreamScope();
    CudaStreamScope(const CudaStreamScope&) = delete;

  private:
    void* outer_;
};

int cuda_device_count();
std::string cuda_device_id();      // of the one in use: equal for two processes of a machine that use the same
void cuda_use_device(int device);  // before the first of the calls above; without it: device 0
struct CudaInfo {
    std::string name;
    int64_t memory = 0;  // bytes
    int multiprocessors = 0;
};
CudaInfo cuda_info();

}  // namespace train70b
