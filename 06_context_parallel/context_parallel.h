#pragma once
// Context parallelism around the model: which tokens a rank computes, and what it does for attention. Norms, linear
// layers and the loss see local tokens only and need no change: the loss is scaled by the tokens of the global batch,
// so losses and gradients of the ranks are summed, as over data-parallel ranks.
#include "01_single_gpu/trainer.h"
#include "06_context_parallel/ring_attention.h"

namespace train70b {

const std::vector<std::string>& context_algorithms();  // ring, zigzag, ulysses, hybrid, gather

struct ContextParallelOptions {
    std::string algorithm = "zigzag";  // one of context_algorithms()
    int64_t ulysses_size = 0;          // of hybrid; 0: 2
};
// --cp, --cp-algorithm, --ulysses-size
void add_context_parallel_flags(Flags& flags, int64_t& cp, ContextParallelOptions& options);
// Usage error, naming the flag and the nearest value that works, where sequence or heads do not divide.
ContextLayout context_layout(const LlamaConfig& config, int64_t seq_len, int64_t cp,
                             const ContextParallelOptions& options);

// Fills the attention slot of every block. ranks: the cp group. Before or after the model is materialised.
void apply_context_parallel(Llama& model, const Comm& ranks, const ContextLayout& layout);
// The trainer gives each rank its tokens. Data parallelism over data x context ranks has been attached before, so that
// losses and gradients are summed over both; data_rank of data_ranks is this rank's part of the batch.
void attach_context_parallel(Trainer& trainer, const ContextLayout& layout, int64_t context_rank, int64_t data_rank,
                             int64_t data_ranks, int64_t seq_len);

}  // namespace train70b
