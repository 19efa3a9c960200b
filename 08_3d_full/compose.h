#pragma once
// The composed trainer: every technique of the chapters before this one, in the order in which they have to be applied.
#include "01_single_gpu/trainer.h"
#include "08_3d_full/config.h"

namespace train70b {

class Composed {
  public:
    // Divides this rank's part of the model and gives its trainer the roles; before allocate(). Both outlive this.
    Composed(Llama& model, Trainer& trainer, const TrainOptions& options, const ParallelConfig& config,
             const Comm& world);

    const MeshComms ranks;
    const ContextLayout context;
    const TensorParallel tensor_parallel;
    const Fp8 fp8;
    Zero zero;
    Pipeline pipeline;
};

}  // namespace train70b
