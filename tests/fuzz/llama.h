#pragma once
// The model of the targets that read one.
#include "01_single_gpu/complete/config.h"

namespace train70b::fuzz {

inline LlamaConfig small() {
    LlamaConfig config = preset("tiny");
    config.layers = 1, config.hidden = 8, config.heads = 2, config.kv_heads = 1, config.ffn = 8, config.vocab = 8;
    return config;
}

}  // namespace train70b::fuzz
