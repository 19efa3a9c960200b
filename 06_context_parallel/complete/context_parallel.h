#pragma once
// Context parallelism of the model: which tokens a rank computes (ContextLayout::tokens_of, for the trainer's batches),
// and its attention. Norms, linear layers and the loss see local tokens only and need no change: the loss is scaled by
// the tokens of the global batch, so losses and gradients are summed over cp ranks as over dp ranks.
#include "01_single_gpu/complete/llama.h"
#include "06_context_parallel/complete/ring_attention.h"

namespace train70b {

// Sets the attention of every block of the model. ranks: the cp group.
void apply_context_parallel(Llama& model, const Comm& ranks, const ContextLayout& layout);

}  // namespace train70b
