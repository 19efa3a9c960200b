#pragma once
// The flags of communication, of this chapter and of all later ones.
#include "01_single_gpu/complete/flags/flags.h"
#include "02_data_parallel/runtime/connect.h"

namespace train70b {

void add_comm_flags(Flags& flags, CommOptions& options);

// The ranks of one model copy: --tp, --pp or --cp if `given`; if it is 0, ranks / --dp, and all ranks without --dp.
// Usage error if the ranks are not divisible by --dp.
int64_t ranks_per_copy(int64_t given, int64_t dp, const Comm& world);

// The number of model copies, ranks / ranks_per_copy. Usage error if --dp is given (not 0) and differs. flag: --tp,
// --pp or --cp, which says ranks_per_copy, if there is one.
int64_t data_parallel_ranks(int64_t dp, const Comm& world, int64_t ranks_per_copy, const std::string& flag);

}  // namespace train70b
