#pragma once
// Text generation with the model as it is spread over the ranks: every layout can print a continuation of a prompt.
//
// One forward pass per token, over a sequence of --seq-len tokens of which those after the last one are padding: causal
// attention does not see them. The last pipeline stage has the logits, each tensor-parallel rank those of its part of
// the vocabulary, for the tokens of its context-parallel rank. There is no cache of keys and values.
#include "01_single_gpu/data/batches.h"
#include "01_single_gpu/roles.h"

namespace train70b {

// What generate() needs of a trainer.
struct Generator {
    Llama& model;
    MicroBatchLoop& loop;
    const Groups& groups;
    const Batches& batches;
    int64_t seq_len;  // of a forward pass: the longest context

    // Appends `count` tokens to the prompt, sampled at temperature 0.8 with a context of the last seq_len tokens.
    // Deterministic for given weights and seed. Collective: called with the same arguments, it returns the same tokens
    // on all ranks.
    std::vector<int32_t> generate(std::vector<int32_t> prompt, int64_t count, uint64_t seed) const;

  private:
    int32_t next(const std::vector<int32_t>& context, double u) const;
};

std::string printable(const std::vector<int32_t>& tokens, bool bytes);  // bytes: as text, else token numbers

}  // namespace train70b
