#pragma once
// The parallel configuration of a run: how the ranks are divided, and the options of every technique.
#include "01_single_gpu/io/options.h"
#include "03_zero/zero.h"
#include "04_tensor_parallel/tensor_parallel.h"
#include "05_pipeline/pipeline.h"
#include "06_context_parallel/context_parallel.h"
#include "07_fp8/fp8.h"
#include "08_3d_full/mesh.h"

namespace train70b {

struct ParallelConfig {
    Mesh mesh{.dp = 0};
    ZeroOptions zero{.stage = 0};
    TensorParallelOptions tensor;
    PipelineOptions pipeline;
    ContextParallelOptions context;
    Fp8Options fp8{.recipe = "off"};
    std::string optimizer = "adamw";
};
void add_parallel_flags(Flags& flags, ParallelConfig& config);

// Usage error for what cannot be combined: why, and what would work. Called on all ranks, with the options' batches checked;
// makes the mesh complete.
void validate(ParallelConfig& config, const TrainOptions& options, int64_t ranks);
ContextLayout context_layout(const ParallelConfig& config, const TrainOptions& options);
Stage stage_of(const ParallelConfig& config, const LlamaConfig& model,
               int64_t rank);  // usage error where layers do not divide
Schedule schedule_of(const ParallelConfig& config, const TrainOptions& options);

}  // namespace train70b
