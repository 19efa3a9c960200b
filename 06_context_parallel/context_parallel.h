#pragma once
// Context parallelism around the model: which tokens a rank computes (ContextLayout::tokens_of, for the trainer's batches),
// and what it does for attention. Norms, linear layers and the loss see local tokens only and need no change: the loss is
// scaled by the tokens of the global batch, so losses and gradients are summed over cp ranks as over dp ranks.
#include "01_single_gpu/llama.h"
#include "06_context_parallel/ring_attention.h"

namespace train70b {

struct ContextParallelOptions {
    std::string algorithm = "zigzag";  // one of context_algorithms()
    int64_t ulysses_size = 0;          // of hybrid; 0: 2
};
// Gives every block of the model its attention. ranks: the cp group.
void apply_context_parallel(Llama& model, const Comm& ranks, const ContextLayout& layout);

}  // namespace train70b
