#pragma once
// The parallel configuration of a run: the mesh, and the options of every technique.
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

// Usage error if the configuration is invalid: what is invalid, and what would work. Computes the mesh. Call it on all
// ranks, after check_batches().
void validate(ParallelConfig& config, const TrainOptions& options, int64_t ranks);
ContextLayout context_layout(const ParallelConfig& config, const TrainOptions& options);
// Usage error if the layers are not divisible.
Stage stage_of(const ParallelConfig& config, const LlamaConfig& model, int64_t rank);
Schedule schedule_of(const ParallelConfig& config, const TrainOptions& options);

}  // namespace train70b
