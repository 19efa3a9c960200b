#pragma once
// The composed trainer: all techniques of the previous chapters. Tensor parallelism comes first, because it narrows
// the parameters, then FP8 layers, then ZeRO.
#include "02_data_parallel/runtime/program.h"
#include "03_zero/zero.h"
#include "04_tensor_parallel/tensor_parallel.h"
#include "05_pipeline/pipeline.h"
#include "06_context_parallel/context_parallel.h"
#include "07_fp8/fp8.h"
#include "08_3d_full/config.h"

namespace train70b {

// This rank's groups along each axis of the mesh (group_colors).
struct MeshComms {
    Comm tp, cp, dp_cp, pp;
};
MeshComms split(const Comm& world, const Mesh& mesh);

class Composed {
  public:
    // Shards the model and sets the trainer's roles. Construct it before allocate(); both must outlive it.
    Composed(Llama& model, Trainer& trainer, const TrainOptions& options, const ParallelConfig& config,
             const Comm& world);

    const MeshComms ranks;
    const ContextLayout context;
    const TensorParallel tensor_parallel;
    const Fp8 fp8;
    Zero zero;
    Pipeline pipeline;
};

void say_layout(const Program& program, const Composed& composed, const ParallelConfig& config);

}  // namespace train70b
