// attention_tiles.cpp once more, for AVX-512: CMakeLists.txt compiles this file alone with -march=x86-64-v4. On another
// processor it defines nothing.
#include "01_single_gpu/attention_tiles.h"

#ifdef __AVX512F__
#define ATTENTION_KERNELS kAvx512Attention
#include "01_single_gpu/attention_tiles.cpp"

namespace train70b::cpu {
const AttentionKernels* avx512_attention() {
    const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                     __builtin_cpu_supports("avx512vl");
    return has ? &kAvx512Attention : nullptr;
}
}  // namespace train70b::cpu
#else
namespace train70b::cpu {
const AttentionKernels* avx512_attention() { return nullptr; }
}  // namespace train70b::cpu
#endif
