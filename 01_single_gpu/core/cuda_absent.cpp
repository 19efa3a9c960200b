// A build without CUDA: of the functions in cuda_device.h it has this one.
#include "01_single_gpu/core/cuda_device.h"

#if !TRAIN70B_CUDA
namespace train70b {
std::string why_no_cuda() { return "this build has no CUDA (install the CUDA Toolkit and build again)"; }
}  // namespace train70b
#endif
