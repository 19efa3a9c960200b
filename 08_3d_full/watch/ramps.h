#pragma once
// --batch-ramp and --seq-ramp: the sizes of a step grow over the first steps of a run (01_single_gpu/data/ramp.h). The
// micro-batch keeps its tokens: a smaller batch has fewer micro-batches, for which the pipeline's schedule is made
// anew.
#include "08_3d_full/validate.h"

namespace train70b {

void add_ramp_flags(Flags& flags, TrainOptions& options);
// Sequences of a micro-batch where the flag is not given: the most that divides every size of the batch ramp over the
// data-parallel ranks; 0 without a ramp.
int64_t ramp_micro_batch(const TrainOptions& options, int64_t dp);
// Usage error where a ramp does not end at --global-batch or --seq-len, or where one of its sizes cannot be divided.
// Call it with the config's mesh, after check_batches().
void check_ramps(const TrainOptions& options, const ParallelConfig& config);

}  // namespace train70b
