#pragma once
// CPU threads, OpenBLAS kernels, and settings that are read before main() begins.
#include <string>
#include <string_view>
#include <vector>

namespace train70b {

// Uses OPENBLAS_NUM_THREADS threads if it is set, else cores / ranks on the node. From here on OpenBLAS has all the
// memory that it maps: it retries a mapping that fails for ever. Usage error if the limit of address space is too low.
void set_cpu_threads(int ranks_on_node);
int cpu_threads();  // of this process

// A number of threads as the environment has it; 0: it is none.
int thread_count(std::string_view text);
// Empty, or that OpenBLAS cannot map so many of its buffers, and which limit of address space would do (ulimit -v).
std::string no_room_for_blas(int buffers);

// The CPU features that decide which OpenBLAS kernels it can run.
struct CpuFeatures {
    bool avx2 = false;         // and FMA
    bool avx512 = false;       // F, CD, BW, DQ, VL
    bool avx512_bf16 = false;  // and bf16 products
};
CpuFeatures cpu_features();  // of this machine; all false unless x86-64

// OpenBLAS's name of the kernels in use: "Haswell". Different kernels differ in the last bits of a product.
std::string blas_core();
// If ranks run different kernels: a message that says which, and how to avoid it. Empty: all run the same.
std::string mixed_blas_cores(const std::vector<std::string>& core_of_rank);

// Empty, or that this value of OPENBLAS_CORETYPE needs AVX2 or AVX-512, which the CPU does not have.
std::string cpu_lacks(const CpuFeatures& features, const std::string& core);

// The value to set for OPENBLAS_CORETYPE if OpenBLAS chose the kernels of an older CPU: it does not know CPUs that are
// newer than itself and may run SSE3 kernels on them, at a fifth of the speed. Empty: `reported` is right.
std::string better_blas_core(const CpuFeatures& features, const std::string& reported);

// Sets variables that are read before main() begins, unless the environment has them, and then restarts the program.
// Must be the first call in main, before MPI_Init.
//   GOMP_SPINCOUNT     an idle OpenMP thread sleeps after some microseconds. By default it spins for milliseconds,
//                      and on a busy machine every parallel loop would wait for a spinning thread.
//   OPENBLAS_CORETYPE  better_blas_core(), if that is not empty
// For GPUs, against hangs while a kernel of NCCL waits for a message that its sender sends only later:
//   CUDA_MODULE_LOADING          EAGER, if a launcher started several ranks: by default a kernel is loaded at its first
//                                launch, which can wait for all kernels that run. Costs device memory and seconds at
//                                the start, for all kernels of cuBLASLt too, so one rank alone does without.
//   NCCL_LAUNCH_ORDER_IMPLICIT   1: the kernels of several communicators start in the order of the calls
//   CUDA_DEVICE_MAX_CONNECTIONS  32: streams that share one of the 8 hardware queues of the default wait for each other
void restart_with_settings(char** argv);

}  // namespace train70b
