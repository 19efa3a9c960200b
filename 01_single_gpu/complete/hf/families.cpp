// What a model of this course is in Hugging Face's format: its family, config.json and names of tensors.
#include "01_single_gpu/complete/hf/families.h"

#include <algorithm>

#include "01_single_gpu/core/json.h"

namespace train70b {

using nlohmann::ordered_json;

const std::vector<Family> kFamilies = {
    {"llama", "LlamaForCausalLM", 0, 0, false, false, false, 2048},
    {"mistral", "MistralForCausalLM", 8, 0, false, false, false, 131072},
    {"qwen2", "Qwen2ForCausalLM", 32, 0, true, false, false, 32768, 1e-6, 1e4, false, 28, true},
    {"qwen3", "Qwen3ForCausalLM", 32, 128, false, true, false, 32768, 1e-6, 1e4, false, 28, true},
    {"mixtral", "MixtralForCausalLM", 8, 0, false, false, true, 131072, 1e-5, 1e6},
    {"qwen3_moe", "Qwen3MoeForCausalLM", 4, 0, false, true, true, 32768},
    {"dots1", "Dots1ForCausalLM", 32, 0, false, true, true, 2048, 1e-6, 1e4, true, 62, true},
    {"deepseek_v3", "DeepseekV3ForCausalLM", 128, 0, false, false, true, 4096, 1e-6, 1e4, true, 0, false, true}};

// Mistral without a window is the same model as Llama, whose class insists on a hidden size that is divisible by the
// heads, and has no windows.
const Family& family_of(const LlamaConfig& c) {
    const auto fits = [&c](const Family& family) {
        if (family.latent != (c.is_latent())) return false;
        if (family.latent && !c.is_sparse()) return true;
        return family.qkv_bias == c.qkv_bias && family.qk_norm == c.qk_norm && family.experts == c.is_sparse() &&
               family.sigmoid == c.experts.sigmoid &&
               (c.family.empty() ? family.name != std::string("llama") || (c.hidden % c.heads == 0 && c.window == 0)
                                 : family.name == c.family);
    };
    const auto found = std::find_if(kFamilies.begin(), kFamilies.end(), fits);
    CHECK(found != kFamilies.end(), "{} with biases {} and norms of q and k {}", c.family, c.qkv_bias, c.qk_norm);
    return *found;
}

void check_hf_attention(const LlamaConfig& c, const std::string& flag) {
    if (c.multi_token) usage_error("{}: has no place for the block of --mtp on (try off)", flag);
    if (c.sinks) usage_error("{}: no family of Hugging Face that is supported has --sinks on (try off)", flag);
    if (c.window > 0 && c.is_latent())
        usage_error("{}: no family of Hugging Face has --window {} with --kv-lora-rank (try --window 0)", flag,
                    c.window);
    if (!c.windowed.empty() && !family_of(c).layer_types)
        usage_error("{}: all layers of {} have the window (try --window-every 1{})", flag, family_of(c).name,
                    c.is_sparse() ? "" : ", or --qk-norm on, as in Qwen3");
}

HfTensor rows_of(const Param& param, std::string name, int64_t begin, int64_t rows) {
    Shape shape = param.global_shape;
    shape[0] = rows;
    return {std::move(name), std::move(shape), begin, rows};
}

std::vector<HfTensor> hf_tensors(const Param& param, const LlamaConfig& config) {
    if (config.is_sparse()) return hf_tensors_of_experts(param, config);
    return {rows_of(param, param.name, 0, param.global_shape[0])};
}

ordered_json hf_config(const LlamaConfig& c, DType dtype) {
    const Family& family = family_of(c);
    ordered_json json = {{"architectures", {family.architecture}},
                         {"model_type", family.name},
                         {"hidden_size", c.hidden},
                         {"intermediate_size", c.ffn},
                         {"num_hidden_layers", c.layers},
                         {"num_attention_heads", c.heads},
                         {"num_key_value_heads", c.kv_heads},
                         {"head_dim", c.head_dim()},
                         {"vocab_size", c.vocab},
                         {"hidden_act", "silu"},
                         {"rms_norm_eps", c.norm_eps},
                         {"rope_theta", c.rope_theta},
                         {"rope_scaling", nullptr},
                         {"attention_bias", false},
                         {"mlp_bias", false},
                         {"tie_word_embeddings", c.tied},
                         {"torch_dtype", dtype == DType::bf16  ? "bfloat16"
                                         : dtype == DType::f64 ? "float64"
                                                               : "float32"}};
    const std::string name = family.name;
    if (name == "qwen2") json.erase("attention_bias");  // it has biases of q, k, v in any case
    if (name != "llama") json.erase("mlp_bias");
    if (name != "llama" && !family.latent) json["sliding_window"] = nullptr;
    if (family.latent)
        json.update({{"head_dim", c.latent.rope_dim},  // as transformers writes it
                     {"kv_lora_rank", c.latent.kv_rank},
                     {"q_lora_rank", c.latent.q_rank > 0 ? ordered_json(c.latent.q_rank) : nullptr},
                     {"qk_nope_head_dim", c.value_dim()},
                     {"qk_rope_head_dim", c.latent.rope_dim},
                     {"v_head_dim", c.value_dim()},
                     {"num_nextn_predict_layers", 0},
                     {"first_k_dense_replace", c.layers}});
    if (name.starts_with("qwen")) json["use_sliding_window"] = false;
    if (name.starts_with("mi")) json.erase("attention_bias");
    if (c.window > 0) json["sliding_window"] = c.window;
    if (c.window > 0 && name.starts_with("qwen")) json["use_sliding_window"] = true;
    for (int64_t layer = 0; layer < c.layers && (!c.windowed.empty() || (c.window > 0 && family.layer_types)); ++layer)
        json[family.layer_types ? "layer_types" : kOwnLayerTypes].push_back(c.has_window(layer) ? "sliding_attention"
                                                                                                : "full_attention");
    if (c.sinks) json[kOwnSinks] = true;
    if (c.multi_token) json[kOwnMultiToken] = true;
    if (c.is_sparse()) add_expert_keys(json, c);
    if (c.context > 0) json["max_position_embeddings"] = c.context;
    if (c.rope_scaling && c.rope_scaling->linear)
        json["rope_scaling"] = {{"rope_type", "linear"}, {"factor", c.rope_scaling->factor}};
    else if (c.rope_scaling)
        json["rope_scaling"] = {{"rope_type", "llama3"},
                                {"factor", c.rope_scaling->factor},
                                {"low_freq_factor", c.rope_scaling->low_freq_factor},
                                {"high_freq_factor", c.rope_scaling->high_freq_factor},
                                {"original_max_position_embeddings", c.rope_scaling->original_context}};
    if (!c.family.empty() && !c.kept.empty()) json.update(ordered_json::parse(c.kept));
    return json;
}

}  // namespace train70b
