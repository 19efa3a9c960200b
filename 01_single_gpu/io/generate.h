#pragma once
// Text generation with a trained model.
#include "01_single_gpu/llama.h"

namespace train70b {

// Appends `count` tokens to the prompt, sampled at temperature 0.8 with a context of the last seq_len tokens.
// Deterministic for given weights and seed.
std::vector<int32_t> generate(Llama& model, std::vector<int32_t> prompt, int64_t count, int64_t seq_len, uint64_t seed);
std::string printable(const std::vector<int32_t>& tokens, bool bytes);  // bytes: as text, else token numbers

}  // namespace train70b
