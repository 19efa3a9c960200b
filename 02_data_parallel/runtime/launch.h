#pragma once
// From the command line to a Comm: MPI's beginning and end, the flags of communication, the choice of transport.
#include "01_single_gpu/trainer.h"
#include "02_data_parallel/comm.h"
#include "02_data_parallel/runtime/trainer_runtime.h"

namespace train70b {

struct CommOptions {
    std::string transport = "auto";         // --comm
    int64_t fake_world = 0, fake_rank = 0;  // --comm fake: ranks of the world, and which of them this is
    double timeout = 30;                    // seconds
    bool check = false;
    std::string all_reduce;  // empty: ring, or NCCL's own
};
void add_comm_flags(Flags& flags, CommOptions& options);

// The frame of main() from here on: as run_program, with MPI around it. Under mpirun, or without it as a single rank.
int run_ranks(int argc, char** argv, const std::function<void(int, char**)>& body);

// All ranks, over the transport that was asked for; sets the number of CPU threads and picks this rank's GPU. Usage
// error, on all ranks, for a transport that cannot work here.
Comm connect(const CommOptions& options, Device device);
Comm connect(const CommOptions& options, const TrainOptions& training);  // and refuses what one rank alone cannot write

int64_t ranks_on_this_node();

// Runs what may end in a usage error on some ranks only (rank 0 opens the files, a disk is missing on one node), before
// training. If it does, all ranks end with the error of the first. It may take its time: the watchdog pauses.
void together(const std::function<void()>& setup);

// --tp, --pp or --cp of a chapter: `given`, or if that is 0 what --dp leaves, all ranks if that is 0 too. Usage error
// when --dp does not divide the ranks.
int64_t ranks_per_copy(int64_t given, int64_t dp, const Comm& world);

// --dp: 0 means what the ranks leave when each model copy takes ranks_per_copy. Usage error when it cannot be.
int64_t data_parallel_ranks(int64_t dp, const Comm& world, int64_t ranks_per_copy);

}  // namespace train70b
