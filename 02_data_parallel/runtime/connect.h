#pragma once
// From main() to a Comm of all ranks, without flags: what a minimal.cpp needs. With flags: launch.h.
#include <functional>

#include "02_data_parallel/comm.h"

namespace train70b {

// Calls the body as run_program does, between MPI_Init and MPI_Finalize. Under mpirun, or without it as a single rank.
int run_ranks(int argc, char** argv, const std::function<void(int, char**)>& body);

// The group of all ranks, with the backend that suits the device. Also sets this rank's number of CPU threads and
// selects its GPU. Usage error, on all ranks, if some have a GPU and others do not.
Comm connect(Device device);

}  // namespace train70b
