#pragma once
// The flags of the parallel configuration, and which of its values work together.
#include "01_single_gpu/flags/options.h"
#include "08_3d_full/config.h"

namespace train70b {

void add_parallel_flags(Flags& flags, ParallelConfig& config);

// Usage error if the configuration is invalid: what is invalid, and what would work. Computes the mesh. Call it on all
// ranks, after check_batches().
void validate(ParallelConfig& config, const TrainOptions& options, int64_t ranks);
ContextLayout context_layout(const ParallelConfig& config, const TrainOptions& options);
Schedule schedule_of(const ParallelConfig& config, const TrainOptions& options);

}  // namespace train70b
