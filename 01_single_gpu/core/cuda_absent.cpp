// A build without CUDA defines only this function of cuda_device.h.
#include "01_single_gpu/core/cuda_device.h"

#if !TRAIN70B_CUDA
namespace train70b {
std::string why_no_cuda() { return "this build has no CUDA (install the CUDA Toolkit and build again)"; }
}  // namespace train70b
#endif
