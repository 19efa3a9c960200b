#pragma once
// --bench: each op alone at the model's shapes, then where the time of a training step goes. Data, not a test.
#include "01_single_gpu/trainer.h"

namespace train70b {

// Prints two tables to stdout.
void bench(const TrainOptions& options, Llama& model, Trainer& trainer);

}  // namespace train70b
