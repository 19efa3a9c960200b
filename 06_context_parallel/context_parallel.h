#pragma once
// Context parallelism of the model: which tokens a rank computes (ContextLayout::tokens_of, for the trainer's batches),
// and its attention. Norms, linear layers and the loss see local tokens only and need no change: the loss is scaled by
// the tokens of the global batch, so losses and gradients are summed over cp ranks as over dp ranks.
#include "01_single_gpu/llama.h"
#include "06_context_parallel/ring_attention.h"

namespace train70b {

struct ContextParallelOptions {
    std::string algorithm = "zigzag";  // one of context_algorithms()
    int64_t ulysses_size = 0;          // of hybrid; 0: 2
};

// One value of --cp-algorithm. To add one, add it to the list in context_parallel.cpp: the flag, the checks, the tests
// and the tables iterate over that list.
struct ContextAlgorithm {
    std::string name, description;
    int64_t chunks;                                        // per group of ranks; 2: zigzag
    bool gather;                                           // an all-gather instead of the ring
    bool takes_ulysses_size;                               // --ulysses-size
    int64_t (*ulysses)(int64_t cp, int64_t ulysses_size);  // U, the ranks of a group that share the heads
};
const std::vector<ContextAlgorithm>& context_algorithms();

// Sets the attention of every block of the model. ranks: the cp group.
void apply_context_parallel(Llama& model, const Comm& ranks, const ContextLayout& layout);

}  // namespace train70b
