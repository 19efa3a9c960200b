#pragma once
// From main() into MPI and out of it.
#include <functional>

namespace train70b {

// Calls the body as run_program does, between MPI_Init and MPI_Finalize. Under mpirun, or without it as a single rank.
int run_ranks(int argc, char** argv, const std::function<void(int, char**)>& body);

}  // namespace train70b
