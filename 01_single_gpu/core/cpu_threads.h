#pragma once
// How many threads the CPU computes with, and the memory that OpenBLAS maps for each of them.
#include <bitset>
#include <string>
#include <string_view>
#include <vector>

namespace train70b {

// Uses as many threads as OMP_NUM_THREADS says, else OPENBLAS_NUM_THREADS, else this process's cores / the ranks that
// share them; the products, as OPENBLAS_NUM_THREADS says. From here on OpenBLAS has all the memory that it maps: it
// retries a mapping that fails for ever. Usage error if the limit of address space is too low.
void use_cpu_threads(int ranks_that_share);
// The same for a program of so many ranks, all on this machine. Usage error if a launcher started more.
void set_cpu_threads(int ranks);
int cpu_threads();  // of this process

constexpr int kMostThreads = 1024, kMostBlasThreads = 64;  // of the second, as Debian's OpenBLAS is built

using CoreSet = std::bitset<kMostThreads>;
int cores_within_reach();  // of this machine, if this process asked for them: a container has some of all
// How many ranks of a node share the cores of one of them, rounded up.
int ranks_that_share(const std::vector<CoreSet>& cores_of_rank, int rank);
// Empty, or a line about cores that no rank uses while a rank has one thread, which nobody asked for.
std::string idle_cores(const std::vector<CoreSet>& cores_of_rank, int within_reach);

// A number of threads as the environment has it; 0: it is none.
int thread_count(std::string_view text);
// Empty, or that OpenBLAS cannot map so many of its buffers, and which limit of address space would do (ulimit -v).
std::string no_room_for_blas(int buffers);

}  // namespace train70b
