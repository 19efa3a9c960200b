#pragma once
// Which OpenBLAS kernels run on this CPU, and which ones should.
#include <string>
#include <string_view>
#include <vector>

namespace train70b {

// The widest vectors that this CPU has. avx2 with FMA; avx512: F, CD, BW, DQ and VL. sse unless x86-64.
enum class CpuVectors { sse, avx2, avx512, avx512_bf16 };
CpuVectors cpu_vectors();

std::string blas_core();  // OpenBLAS's name of the kernels in use: "Haswell"; platform/
// The value to set for OPENBLAS_CORETYPE if OpenBLAS does not know this CPU, which is newer than itself, and runs its
// SSE3 kernels: in fp64 at 0.4 of the speed. Empty: `reported` is right.
std::string better_blas_core(CpuVectors cpu, std::string_view reported);

// If ranks compute products with different kernels, which differ in their last bits: a message that says which. Empty:
// all have the same.
std::string mixed_kernels(const std::vector<std::string>& of_rank);

}  // namespace train70b
