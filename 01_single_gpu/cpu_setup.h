#pragma once
// How the CPU is used: threads, and a setting that is read before main() begins.

namespace train70b {

// OPENBLAS_NUM_THREADS wins, else cores / ranks on the node.
void set_cpu_threads(int ranks_on_node);

// Sets GOMP_SPINCOUNT, unless the environment has it, and starts the program over, once: libgomp reads it before
// main(). With it an idle OpenMP thread sleeps after some microseconds. It would spin for milliseconds, and on a
// machine that has anything else to do every parallel loop would wait for a spinning thread to be descheduled. To be
// called first thing in main, before MPI_Init.
void restart_with_cpu_settings(char** argv);

}  // namespace train70b
