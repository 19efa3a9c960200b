#pragma once
// From main() to a Comm of all ranks: starting and ending MPI, choosing the backend.
#include "01_single_gpu/trainer.h"
#include "02_data_parallel/flags.h"
#include "02_data_parallel/runtime/connect.h"

namespace train70b {

// As connect(device), with the backend of the options. Usage error, on all ranks, if it cannot work here.
Comm connect(const CommOptions& options, Device device);
// The same; with --comm fake also a usage error for outputs that need the whole model.
Comm connect(const CommOptions& options, const TrainOptions& training);

int64_t ranks_on_this_node();
std::vector<std::string> hosts_of_ranks();  // their names, in rank order, on rank 0; elsewhere empty. Collective.

// Selects this rank's GPU: the ranks of a node take them in turn. Collective over all ranks, before the first
// allocation. connect() calls it where the device is a GPU.
void select_gpu();

// Runs setup code that may end in a usage error on some ranks only: rank 0 opens the files, one node lacks a disk. In
// that case all ranks end with the error of the first. The watchdog pauses meanwhile.
void together(const std::function<void()>& setup);

}  // namespace train70b
