#pragma once
// DiLoCo's flags, and a run with outer steps.
#include "02_data_parallel/complete/outer_steps.h"
#include "02_data_parallel/runtime/program.h"

namespace train70b {

// --outer-steps, --outer-lr, --outer-momentum, --outer-fragments
void add_outer_flags(Flags& flags, OuterOptions& options);
// Usage error for a flag without --outer-steps, and for what does not go with it.
void check_outer_steps(const OuterOptions& options, const TrainOptions& run, const Flags& flags);

// Elements of each fragment.
std::vector<int64_t> fragment_sizes(Llama& model, int64_t fragments);
// Bytes that a rank of N sends in `steps` steps: 2 n (N-1)/N for an outer step of n bytes, width bytes an element.
int64_t outer_bytes(const std::vector<int64_t>& fragments, int64_t width, int64_t N, int64_t every, int64_t steps);

// Trains with outer steps; prints the layout before, the tables after.
void train_by_outer_steps(Program& program, const Comm& ranks, const OuterOptions& options);

}  // namespace train70b
