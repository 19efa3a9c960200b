#pragma once
// The table of chapter 07: what 8 bits save in memory and on the wire.
#include "02_data_parallel/runtime/program.h"
#include "07_fp8/complete/compose.h"

namespace train70b {

// Peak activation bytes of one micro-batch of `rows` rows, where all of the blocks' layers keep FP8 data.
int64_t fp8_activations(const LlamaConfig& config, int64_t rows, DType dtype, Recompute recompute, const Recipe& recipe,
                        int64_t tensor_ranks, int64_t recompute_every = 1);

void say_layout(const Program& program, const Fp8Trainer& composed, const TensorComms& layout, const ZeroOptions& zero,
                const Precision& precision);

// Of the run's last step.
void print_table(Program& program, const TensorComms& layout, const Precision& precision);

}  // namespace train70b
