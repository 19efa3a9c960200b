#pragma once
// The composed trainer: all techniques of the previous chapters. Tensor and expert parallelism come first, because they
// narrow the parameters, then FP8 layers, then ZeRO.
#include "02_data_parallel/runtime/program.h"
#include "03_zero/zero.h"
#include "04_tensor_parallel/tensor_parallel.h"
#include "05_pipeline/pipeline.h"
#include "06_context_parallel/context_parallel.h"
#include "07_fp8/fp8.h"
#include "08_3d_full/config.h"
#include "08_3d_full/experts/expert_parallel.h"

namespace train70b {

// This rank's groups along each axis of the mesh (group_colors).
struct MeshComms {
    Comm tp, cp, dp_cp, pp;
    Comm ep, edp;          // of one rank without experts
    bool own_edp = false;  // edp has other ranks than dp_cp
};
MeshComms split(const Comm& world, const Mesh& mesh, bool experts = false);

class Composed {
  public:
    // Shards the model and sets the trainer's roles. Construct it before allocate(); both must outlive it.
    Composed(Llama& model, Trainer& trainer, const TrainOptions& options, const ParallelConfig& config,
             const Comm& world);

    const MeshComms ranks;
    const ContextLayout context;
    const TensorParallel tensor_parallel;
    const ExpertParallel expert_parallel;
    const Fp8 fp8;
    Zero zero;
    Pipeline pipeline;
};

void say_layout(const Program& program, const Composed& composed, const ParallelConfig& config);

}  // namespace train70b
