#pragma once
// The flags of context parallelism, and the sizes that it accepts.
#include "01_single_gpu/complete/flags/flags.h"
#include "06_context_parallel/complete/context_parallel.h"

namespace train70b {

// --cp, --cp-algorithm, --ulysses-size
void add_context_parallel_flags(Flags& flags, int64_t& cp, ContextParallelOptions& options);

}  // namespace train70b
