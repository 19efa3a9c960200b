#pragma once
// Text generation with the model as it is spread over the ranks: every layout can print a continuation of a prompt.
//
// One forward pass per token, over a sequence of --seq-len tokens of which those after the last one are padding: causal
// attention does not see them. The last pipeline stage has the logits, each tensor-parallel rank those of its part of
// the vocabulary, for the tokens of its context-parallel rank. There is no cache of keys and values.
#include "01_single_gpu/complete/trainer.h"

namespace train70b {

// Continues a prompt by `count` tokens, which are returned behind it: drawn at temperature 0.8 with a context of the
// last seq_len tokens. Deterministic for given weights and seed. Collective: called with the same arguments, it returns
// the same tokens on all ranks.
std::vector<int32_t> generate(Trainer& trainer, std::vector<int32_t> prompt, int64_t count, uint64_t seed);
std::vector<int32_t> generate(Trainer& trainer, int64_t count);  // of --prompt or the beginning of the held-out data

std::string printable(const std::vector<int32_t>& tokens, bool bytes);  // bytes: as text, else token numbers

void report_sample(Trainer& trainer, int64_t step);  // --sample-every: a line and an event

}  // namespace train70b
