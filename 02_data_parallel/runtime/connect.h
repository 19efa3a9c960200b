#pragma once
// From main() into MPI and out of it; a Comm of all ranks, with the backend that suits the device.
#include <functional>
#include <string>
#include <vector>

#include "02_data_parallel/comm.h"

namespace train70b {

// Calls the body as run_program does, and MPI_Finalize after it if it started MPI. Under mpirun, or without it as a
// single rank. Until MPI is started, this_rank is what the launcher says.
int run_ranks(int argc, char** argv, const std::function<void(int, char**)>& body);

// MPI_Init, once; connect() calls it. timeout: --comm-timeout, seconds that the other ranks may take. Usage error where
// a launcher started several processes that this MPI does not connect: each would train alone, and say nothing.
void start_mpi(double timeout);

struct CommOptions {
    std::string backend = "auto";           // --comm
    int64_t fake_world = 0, fake_rank = 0;  // --comm fake: number of simulated ranks, and which one this process runs
    double timeout = 30;                    // --comm-timeout, seconds
    bool check = false;                     // --comm-check
    std::string streams = "group";          // --comm-streams
    std::string all_reduce;                 // a name of all_reduce.h; empty: ring, or NCCL's own
    int64_t ranks_per_node = 0;             // --ranks-per-node; 0: a node is a machine
};

// The group of all ranks; sets CPU threads and the GPU. Usage error, on all ranks, if the backend cannot work here.
Comm connect(const CommOptions& options, Device device);
Comm connect(Device device);

int64_t ranks_on_this_node();
std::vector<std::string> gather_words(const std::string& local);  // in rank order. Collective.
std::vector<std::string> hosts_of_ranks();                        // their names

// Selects this rank's GPU: those of a node take them in turn. Collective, before any allocation; connect() calls it.
void select_gpu();

// Runs setup code that may end in a usage error on some ranks only: rank 0 opens the files, one node lacks a disk. In
// that case all ranks end with the error of the first. The watchdog pauses meanwhile.
void together(const std::function<void()>& setup);

}  // namespace train70b
