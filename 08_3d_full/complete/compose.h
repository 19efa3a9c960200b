#pragma once
// The composed trainer: all techniques of the previous chapters. Tensor and expert parallelism come first, because they
// narrow the parameters, then FP8 layers, then ZeRO.
#include "02_data_parallel/runtime/program.h"
#include "03_zero/complete/zero.h"
#include "04_tensor_parallel/complete/tensor_parallel.h"
#include "05_pipeline/complete/pipeline.h"
#include "06_context_parallel/complete/context_parallel.h"
#include "07_fp8/complete/fp8.h"
#include "08_3d_full/complete/layout/config.h"
#include "08_3d_full/complete/layout/mesh_comms.h"
#include "08_3d_full/experts/expert_parallel.h"

namespace train70b {

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
