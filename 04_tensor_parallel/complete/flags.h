#pragma once
// The flags of tensor parallelism, and the sizes that it accepts.
#include "01_single_gpu/complete/flags/flags.h"
#include "04_tensor_parallel/complete/tensor_parallel.h"

namespace train70b {

void add_tensor_parallel_flags(Flags& flags, int64_t& tp, TensorParallelOptions& options);

// Ranks are numbered tp fastest: each model copy's, and those that hold the same parameters. Collective.
struct TensorComms {
    Comm tensor_ranks, data_ranks;
};
TensorComms split(const Comm& world, int64_t tp);

// Usage error, naming the flag, unless heads, ffn and (with sequence parallelism) the sequence are divisible by tp.
void check_tensor_parallel(const LlamaConfig& config, int64_t seq_len, int64_t tp,
                           const TensorParallelOptions& options);

}  // namespace train70b
