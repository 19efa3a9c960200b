#pragma once
// How the CPU is used: threads, and two settings that libraries read before main() begins.

namespace train70b {

// OPENBLAS_NUM_THREADS wins, else cores / ranks on the node.
void set_cpu_threads(int ranks_on_node);

// Sets what is not yet set in the environment and starts the program over, once:
//   GOMP_SPINCOUNT      an idle OpenMP thread sleeps after some microseconds. It would spin for milliseconds, and on a
//   machine
//                       that has anything else to do every parallel loop would wait for a spinning thread to be
//                       descheduled.
//   OPENBLAS_CORETYPE   an OpenBLAS older than the CPU falls back to AVX2 kernels; with AVX-512 the right ones are
//   twice as fast.
// To be called first thing in main, before MPI_Init.
void restart_with_cpu_settings(char** argv);

}  // namespace train70b
