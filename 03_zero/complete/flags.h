#pragma once
// The flags of ZeRO and their checks.
#include "01_single_gpu/complete/flags/options.h"
#include "03_zero/complete/zero.h"

namespace train70b {

// --zero, --hybrid-shard, --offload, --offload-dir, --prefetch, and chapter 02's --dp, --bucket-mb, --overlap
void add_zero_flags(Flags& flags, int64_t& dp, ZeroOptions& options);
// Usage error for sizes that are not divisible, flags that cannot be combined, and offload beyond host memory or disk.
// states: bytes per parameter of the optimizer's states [AdamW's].
void check_zero(const ZeroOptions& options, const TrainOptions& training, int64_t data_ranks, int64_t ranks_on_node,
                std::optional<double> states = {});

}  // namespace train70b
