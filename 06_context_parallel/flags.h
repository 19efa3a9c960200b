#pragma once
// The flags of context parallelism, and the sizes that it accepts.
#include "01_single_gpu/io/flags.h"
#include "06_context_parallel/context_parallel.h"

namespace train70b {

// --cp, --cp-algorithm, --ulysses-size
void add_context_parallel_flags(Flags& flags, int64_t& cp, ContextParallelOptions& options);
// Usage error, naming the flag and the nearest value that works, where sequence or heads are not divisible.
ContextLayout context_layout(const LlamaConfig& config, int64_t seq_len, int64_t cp,
                             const ContextParallelOptions& options);

}  // namespace train70b
