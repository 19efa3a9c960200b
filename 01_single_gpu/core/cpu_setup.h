#pragma once
// How the CPU is used: threads, the BLAS's kernels, and settings that are read before main() begins.
#include <string>
#include <vector>

namespace train70b {

// OPENBLAS_NUM_THREADS wins, else cores / ranks on the node.
void set_cpu_threads(int ranks_on_node);
int cpu_threads();  // of this process

// What decides which of OpenBLAS's kernels a CPU can run.
struct CpuFeatures {
    bool avx2 = false;         // and FMA
    bool avx512 = false;       // F, CD, BW, DQ, VL
    bool avx512_bf16 = false;  // and bf16 products
};
CpuFeatures cpu_features();  // of this machine; all false where it is no x86-64

// The kernels in use, as OpenBLAS names them: "Haswell". Two kinds differ in the last bits of a product.
std::string blas_core();
// Where ranks run different kernels: which, and what would make them alike. Empty: all run the same.
std::string mixed_blas_cores(const std::vector<std::string>& core_of_rank);

// The value of OPENBLAS_CORETYPE that fits the CPU, where OpenBLAS runs the kernels of an older one: it does not know
// CPUs that are newer than itself and may take SSE3 kernels for them, at a fifth of the speed. Empty: `reported` fits.
std::string better_blas_core(const CpuFeatures& features, const std::string& reported);

// Sets what is read before main() begins and starts the program over, once; what the environment has stays. To be
// called first thing in main, before MPI_Init.
//   GOMP_SPINCOUNT     an idle OpenMP thread sleeps after some microseconds. It would spin for milliseconds, and on a
//                      machine that has anything else to do every parallel loop would wait for a spinning thread.
//   OPENBLAS_CORETYPE  better_blas_core(), unless that is empty
void restart_with_cpu_settings(char** argv);

}  // namespace train70b
