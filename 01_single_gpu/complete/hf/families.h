#pragma once
// The families of models in Hugging Face's format that this course reads and writes.
#include "01_single_gpu/complete/hf/hf.h"

namespace train70b {

// What the families' configuration classes in transformers differ in.
struct Family {
    const char* name;          // model_type
    const char* architecture;  // the class of the model
    int64_t kv_heads;          // default of num_key_value_heads; 0: num_attention_heads
    int64_t head_dim;          // default; 0: hidden_size / num_attention_heads
    bool qkv_bias, qk_norm, experts;
    bool sigmoid = false;  // DeepSeek-V3's router and shared experts; with the attention of Qwen3
};
extern const std::vector<Family> kFamilies;

// The family that a model is written as.
const Family& family_of(const LlamaConfig& config);

}  // namespace train70b
