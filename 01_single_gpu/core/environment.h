#pragma once
// Environment variables that libraries read before main() begins. Values that they cannot use end the program there,
// in one line with exit code 2, because the libraries would hang on them or print lines of their own (environment.cpp).
#include "01_single_gpu/core/cpu_threads.h"

namespace train70b {

void check_environment(int count, char** argv, char** environment);  // the platform calls it (platform.h)

// Sets variables unless the environment has them, and then executes the program again, so that the libraries read them.
// Must be the first call in main, before MPI_Init.
//   GOMP_SPINCOUNT     an idle OpenMP thread sleeps after some microseconds. By default it spins for milliseconds,
//                      and on a busy machine every parallel loop would wait for a spinning thread.
//   KMP_BLOCKTIME      the same of clang's OpenMP, whose threads spin for 0.2 s
//   OMPI_MCA_mpi_yield_when_idle  1: a rank that waits in Open MPI leaves its core to others. Open MPI does so itself
//                                 only if mpirun counts more ranks than cores; not under srun, or a container's limit
//   OPENBLAS_CORETYPE  better_blas_core(), if that is not empty
// For GPUs, against hangs while a kernel of NCCL waits for a message that its sender sends only later:
//   CUDA_MODULE_LOADING          EAGER, if a launcher started several ranks: by default a kernel is loaded at its first
//                                launch, which can wait for all kernels that run. Costs device memory and seconds at
//                                the start, for all kernels of cuBLASLt too, so one rank alone does without.
//   NCCL_LAUNCH_ORDER_IMPLICIT   1: the kernels of several communicators start in the order of the calls
//   NCCL_RUNTIME_CONNECT         0: NCCL connects the ranks of a group when it is made. By default a collective's first
//                                call does, blocks the host and allocates: in a backward pass, beside posted receives
//   CUDA_DEVICE_MAX_CONNECTIONS  32: streams that share one of the 8 hardware queues of the default wait for each other
void execute_with_settings(char** argv);

// The cores that this process may use, as it was started: OpenMP binds its first thread to one (OMP_PROC_BIND).
CoreSet cores_at_start();

}  // namespace train70b
