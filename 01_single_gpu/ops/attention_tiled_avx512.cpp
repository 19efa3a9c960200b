// attention_tiled_kernel.cpp compiled for AVX-512: CMakeLists.txt gives this file alone -march=x86-64-v4. On other
// architectures it is empty. No function here may be called before avx512_attention() has checked the machine.
#include "01_single_gpu/ops/attention_tiled.h"

#ifdef __AVX512F__
#define ATTENTION_KERNELS kAvx512Table
#include "01_single_gpu/ops/attention_tiled_kernel.cpp"

namespace train70b::cpu {
const AttentionKernels* const kAvx512Attention = &kAvx512Table;
}
#else
namespace train70b::cpu {
const AttentionKernels* const kAvx512Attention = nullptr;
}
#endif
