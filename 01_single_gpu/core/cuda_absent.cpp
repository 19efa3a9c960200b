// What a build without CUDA defines of cuda_device.h.
#include "01_single_gpu/core/cuda_device.h"

#if !TRAIN70B_CUDA
namespace train70b {
std::string why_no_cuda() { return "this build has no CUDA (install the CUDA Toolkit and build again)"; }
int cuda_device_count() { return 0; }
CudaInfo cuda_info() { return {}; }
std::string cuda_versions() { return ""; }
DeviceMemory cuda_memory() { return {}; }
}  // namespace train70b
#endif
