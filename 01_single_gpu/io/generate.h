#pragma once
// Text from a trained model.
#include "01_single_gpu/llama.h"

namespace train70b {

// Continues a prompt with `count` tokens, drawn from the model's distribution at temperature 0.8; a pure function of the
// weights and the seed. The context is the last seq_len tokens.
std::vector<int32_t> generate(Llama& model, std::vector<int32_t> prompt, int64_t count, int64_t seq_len, uint64_t seed);
std::string printable(const std::vector<int32_t>& tokens, bool bytes);  // text of byte tokens, else numbers

}  // namespace train70b
