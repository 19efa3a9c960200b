#pragma once
// The composed trainer: every technique of the chapters before this one, in the order in which they have to be applied.
#include "02_data_parallel/runtime/launch.h"
#include "03_zero/zero.h"
#include "04_tensor_parallel/tensor_parallel.h"
#include "05_pipeline/pipeline.h"
#include "06_context_parallel/context_parallel.h"
#include "07_fp8/fp8.h"
#include "08_3d_full/mesh.h"

namespace train70b {

struct Plan {
    Mesh mesh{.dp = 0};
    ZeroOptions zero{.stage = 0};
    TensorParallelOptions tensor;
    PipelineOptions pipeline;
    ContextParallelOptions context;
    Fp8Options fp8{.recipe = "off"};
    std::string optimizer = "adamw";
};
void add_plan_flags(Flags& flags, Plan& plan);

// Settles what depends on the number of ranks and on the batch (the mesh, micro-batches), and refuses what cannot be
// composed: a usage error that says why, and what would work. To be called on all ranks, with the options' batches
// checked.
void settle(Plan& plan, const TrainOptions& options, int64_t ranks);
ContextLayout context_layout(const Plan& plan, const TrainOptions& options);
Stage stage_of(const Plan& plan, const LlamaConfig& config, int64_t rank);  // usage error where layers do not divide

class Composed {
  public:
    // Fills the slots of this rank's part of the model and of its trainer; before the model is materialised. Both
    // outlive this.
    Composed(Llama& model, Trainer& trainer, const TrainOptions& options, const Plan& plan, const Comm& world);

    const MeshComms ranks;
    const ContextLayout context;
    const TensorParallel tensor_parallel;
    const Fp8 fp8;
    Zero zero;
    Pipeline pipeline;

  private:
    static ContextLayout apply_context(Llama&, const MeshComms&, const Plan&, const TrainOptions&);
};

}  // namespace train70b
