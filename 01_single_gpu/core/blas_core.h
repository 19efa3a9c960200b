#pragma once
// Which OpenBLAS kernels run on this CPU, and which ones should.
#include <string>
#include <string_view>
#include <vector>

namespace train70b {

// The widest vectors that a CPU has, or that kernels use. avx2 with FMA; avx512: F, CD, BW, DQ and VL; unknown: of a
// core that is newer than those known here, or not x86-64.
enum class CpuVectors { sse, avx, avx2, avx512, avx512_bf16, unknown };
CpuVectors cpu_vectors();  // of this machine: sse, avx2, avx512 or avx512_bf16; sse unless x86-64

// OpenBLAS's name of the kernels in use: "Haswell". Different kernels differ in the last bits of a product.
std::string blas_core();  // platform/
// If ranks run different kernels: a message that says which, and how to avoid it. Empty: all run the same.
std::string mixed_blas_cores(const std::vector<std::string>& core_of_rank);

// Empty, or that this value of OPENBLAS_CORETYPE needs AVX2 or AVX-512, which the CPU does not have.
std::string cpu_lacks(CpuVectors cpu, std::string_view core);

// The value to set for OPENBLAS_CORETYPE if OpenBLAS chose the kernels of an older CPU: it does not know CPUs that are
// newer than itself and may run SSE3 kernels on them, at a fifth of the speed. Empty: `reported` is right.
std::string better_blas_core(CpuVectors cpu, std::string_view reported);

}  // namespace train70b
