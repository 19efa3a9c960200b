#pragma once
// How many threads the CPU computes with, and the memory that OpenBLAS maps for each of them.
#include <string>
#include <string_view>

namespace train70b {

// Uses OPENBLAS_NUM_THREADS threads if it is set, else cores / ranks on the node. From here on OpenBLAS has all the
// memory that it maps: it retries a mapping that fails for ever. Usage error if the limit of address space is too low.
void set_cpu_threads(int ranks_on_node);
int cpu_threads();  // of this process

constexpr int kMostThreads = 1024, kMostBlasThreads = 64;  // of the second, as Debian's OpenBLAS is built
// A number of threads as the environment has it; 0: it is none.
int thread_count(std::string_view text);
// Empty, or that OpenBLAS cannot map so many of its buffers, and which limit of address space would do (ulimit -v).
std::string no_room_for_blas(int buffers);

}  // namespace train70b
