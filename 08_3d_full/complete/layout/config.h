#pragma once
// The parallel configuration of a run: the mesh, the options of every technique, their flags, and which values work
// together.
#include "01_single_gpu/complete/flags/options.h"
#include "03_zero/complete/zero.h"
#include "04_tensor_parallel/complete/tensor_parallel.h"
#include "05_pipeline/complete/pipeline_options.h"
#include "06_context_parallel/complete/context_layout.h"
#include "07_fp8/complete/recipes.h"
#include "08_3d_full/complete/layout/mesh.h"

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
Schedule schedule_of(const ParallelConfig& config, const TrainOptions& options);
// Usage error if the layers are not divisible.
Stage stage_of(const ParallelConfig& config, const LlamaConfig& model, int64_t rank);

// What a step computes, without how it is divided: what the planner knows of TrainOptions.
struct Workload : Llama::Options {
    LlamaConfig model;
    int64_t seq_len = 0, micro_batch = 1, global_batch = 0;  // tokens; sequences

    int64_t micro_batches(int64_t dp) const { return global_batch / (micro_batch * dp); }
};

}  // namespace train70b
