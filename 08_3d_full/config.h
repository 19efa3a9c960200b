#pragma once
// The parallel configuration of a run: the mesh, and the options of every technique.
#include "03_zero/options.h"
#include "04_tensor_parallel/options.h"
#include "05_pipeline/stages.h"
#include "06_context_parallel/context_layout.h"
#include "07_fp8/options.h"
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
// Usage error if the layers are not divisible.
Stage stage_of(const ParallelConfig& config, const LlamaConfig& model, int64_t rank);

}  // namespace train70b
