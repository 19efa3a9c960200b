#pragma once
// From main() into MPI and out of it.
#include <functional>

namespace train70b {

// Calls the body as run_program does, and MPI_Finalize after it if it started MPI. Under mpirun, or without it as a
// single rank. Until MPI is started, this_rank is what the launcher says.
int run_ranks(int argc, char** argv, const std::function<void(int, char**)>& body);

// MPI_Init, once; connect() calls it. timeout: --comm-timeout, seconds that the other ranks may take. Usage error where
// a launcher started several processes that this MPI does not connect: each would train alone, and say nothing.
void start_mpi(double timeout);

}  // namespace train70b
