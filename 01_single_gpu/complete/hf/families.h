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
    int64_t context;         // default of max_position_embeddings
    double norm_eps = 1e-6;  // default of rms_norm_eps
    double rope_theta = 10000;
    bool sigmoid = false;      // as in DeepSeek-V3; with the attention of Qwen3
    int64_t full_layers = 0;   // default of max_window_layers: the layers before it have no window
    bool layer_types = false;  // have the last word
    bool latent = false;       // latent attention; some layers, or all, may be dense
};
extern const std::vector<Family> kFamilies;

// The family that a model is written as.
const Family& family_of(const LlamaConfig& config);

// Rows [begin, begin + rows) of a parameter under a name of their own.
HfTensor rows_of(const Param& param, std::string name, int64_t begin, int64_t rows);

// Of models with experts (experts/hf_experts.cpp).
std::vector<HfTensor> hf_tensors_of_experts(const Param& param, const LlamaConfig& config);
void add_expert_keys(nlohmann::ordered_json& config_json, const LlamaConfig& config);

}  // namespace train70b
