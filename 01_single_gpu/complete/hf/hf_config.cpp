// Reads the config.json of Hugging Face's Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE and dots.llm1. What a file
// leaves out has the default of the family's class in transformers.
#include <filesystem>

#include "01_single_gpu/complete/hf/families.h"
#include "01_single_gpu/core/json.h"
#include "01_single_gpu/core/json_object.h"

namespace train70b {

using nlohmann::json;

namespace {

// No model has others; far beyond them the angles or their frequencies overflow.
double read_theta(const JsonObject& keys) { return keys.real("rope_theta", 1, 1e12); }
double read_factor(const JsonObject& rope) { return rope.real("factor", 1, 1e6); }

// Reads both versions of the format: rope_theta and rope_scaling, or rope_parameters with all of it.
void read_rope(const JsonObject& keys, LlamaConfig& config) {
    if (keys.has("rope_theta")) config.rope_theta = read_theta(keys);
    if (keys.has("rope_scaling") && keys.has("rope_parameters"))
        keys.refuse("rope_scaling", "conflicts with rope_parameters (must be one of the two)");
    const char* key = keys.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
    if (!keys.has(key)) return;
    const JsonObject rope = keys.inner(key);
    if (rope.has("rope_theta")) {
        const double theta = read_theta(rope);
        if (keys.has("rope_theta") && theta != config.rope_theta)
            keys.refuse("rope_theta", fmt::format("but {} has {}", key, theta));
        config.rope_theta = theta;
    }
    rope.only("partial_rotary_factor", 1.0, "only 1.0 is supported");
    const char* type_key = rope.has("rope_type") ? "rope_type" : "type";
    if (!rope.has(type_key) && !rope.has("factor")) return;
    const std::string type = rope.text(type_key);
    if (type == "default") return;
    if (type == "linear") {
        config.rope_scaling = RopeScaling{.factor = read_factor(rope), .linear = true};
        return;
    }
    if (type != "llama3") rope.refuse(type_key, "only \"default\", \"linear\" and \"llama3\" are supported");
    const RopeScaling s{read_factor(rope), rope.real("low_freq_factor"), rope.real("high_freq_factor"),
                        rope.integer("original_max_position_embeddings")};
    if (!(s.low_freq_factor < s.high_freq_factor))
        rope.refuse("low_freq_factor", fmt::format("must be less than high_freq_factor {}", s.high_freq_factor));
    config.rope_scaling = s;
}

const Family& family_of(const JsonObject& keys) {
    const std::string name = keys.has("model_type") ? keys.text("model_type") : "llama";
    for (const Family& family : kFamilies)
        if (name == family.name) return family;
    std::string names;
    for (const Family& family : kFamilies) names += fmt::format("{}\"{}\"", names.empty() ? "" : ", ", family.name);
    keys.refuse("model_type", fmt::format("only {} are supported", names));
}

// Usage error, naming the key, if some layer's attention sees a window only.
void refuse_windows(const JsonObject& keys, const Family& family, int64_t layers) {
    const char* why = "sliding-window attention is not supported";
    if (keys.has("layer_types")) {
        if (!keys.all_are("layer_types", "full_attention")) keys.refuse("layer_types", why);
        return;
    }
    if (family.name == std::string("mixtral") && keys.has("sliding_window")) keys.refuse("sliding_window", why);
    if (family.name == std::string("mistral") && !keys.is_null("sliding_window"))
        keys.refuse("sliding_window", (keys.has("sliding_window") ? "" : "is missing, which means 4096: ") +
                                          std::string(why) + " (must be null)");
    if (family.sigmoid) {  // the layers from max_window_layers on
        if (!keys.is_null("sliding_window") &&
            (keys.has("max_window_layers") ? keys.integer("max_window_layers", kMaxLayers, 0) : 62) < layers)
            keys.refuse("sliding_window", (keys.has("sliding_window") ? "" : "is missing, which means 4096: ") +
                                              std::string(why) + " (must be null)");
        return;
    }
    if (family.qkv_bias || family.qk_norm) {  // Qwen: the layers from max_window_layers on, of Qwen3-MoE all
        const int64_t full = family.experts                  ? 0
                             : keys.has("max_window_layers") ? keys.integer("max_window_layers", kMaxLayers, 0)
                                                             : 28;
        if (keys.flag("use_sliding_window", false) && !keys.is_null("sliding_window") && full < layers)
            keys.refuse("use_sliding_window", why);
    }
}

void refuse_other_models(const JsonObject& keys, const Family& family) {
    keys.only("hidden_act", "silu", "only \"silu\" is supported");
    // Llama's and Qwen3's also means a bias of o_proj; Qwen2 has its biases without this key.
    if (!family.qkv_bias) keys.only("attention_bias", false, "a bias of o_proj is not supported");
    keys.only("mlp_bias", false, "biases of the MLP are not supported");
    for (const char* key : {"num_experts", "num_local_experts", "n_routed_experts"})
        if (keys.has(key) && !family.experts)
            keys.refuse(key, fmt::format("model_type \"{}\" has no experts", family.name));
    keys.only("partial_rotary_factor", 1.0, "only 1.0 is supported");
    if (keys.has("quantization_config")) keys.refuse("quantization_config", "quantized weights are not supported");
}

// One of the two names of the number of experts, which transformers 5 treats as the same.
const char* experts_key(const JsonObject& keys, const Family& family) {
    const bool mixtral = family.name == std::string("mixtral");
    const char *own = family.sigmoid ? "n_routed_experts"
                      : mixtral      ? "num_local_experts"
                                     : "num_experts",
               *other = mixtral ? "num_experts" : "num_local_experts";
    if (keys.has(own) && keys.has(other))
        keys.refuse(other, fmt::format("conflicts with {} (must be one of the two)", own));
    return keys.has(other) ? other : own;
}

ExpertsConfig read_experts(const JsonObject& keys, const Family& family) {
    ExpertsConfig x;
    x.count = keys.integer(experts_key(keys, family), kMaxExperts);
    x.top_k = keys.integer("num_experts_per_tok");
    if (family.name == std::string("mixtral")) {
        keys.only("router_jitter_noise", 0.0, "only 0.0 is supported");
        x.ffn = keys.integer("intermediate_size");
        return x;
    }
    x.ffn = keys.integer("moe_intermediate_size");
    x.normalize = keys.flag("norm_topk_prob", false);
    if (family.sigmoid) {
        x.sigmoid = true;
        x.shared = keys.integer("n_shared_experts", kMaxExperts);
        if (keys.has("n_group")) x.groups = keys.integer("n_group");
        if (keys.has("topk_group")) x.top_groups = keys.integer("topk_group");
        if (keys.has("routed_scaling_factor")) x.scale = keys.real("routed_scaling_factor");
        if (keys.has("first_k_dense_replace")) x.dense_layers = keys.integer("first_k_dense_replace", kMaxLayers, 0);
        if (x.groups > x.count / 2)
            keys.refuse("n_group", fmt::format("needs two experts or more per group, but there are {}", x.count));
        keys.only("moe_layer_freq", 1, "only 1 is supported");
        return x;
    }
    keys.only("decoder_sparse_step", 1, "only 1 is supported");
    if (keys.has("mlp_only_layers")) {
        const std::vector<int64_t> dense = keys.integers("mlp_only_layers");
        for (int64_t layer : dense)
            if (layer != x.dense_layers++) keys.refuse("mlp_only_layers", "must be [], or the first layers in order");
    }
    return x;
}

}  // namespace

LlamaConfig read_hf_config(const std::string& dir) {
    const std::string path = dir + "/config.json";
    std::error_code error;
    if (!std::filesystem::is_directory(dir, error))
        usage_error("--load-hf {}: is not a folder (must contain config.json and model.safetensors)", dir);
    LlamaConfig config = parse_hf_config(read_json(path, path, "must be next to the weights"), path);
    config.name = std::filesystem::weakly_canonical(dir, error).filename().string();
    return config;
}

LlamaConfig parse_hf_config(const json& object, const std::string& path) {
    const JsonObject keys(path, object);
    const Family& family = family_of(keys);
    refuse_other_models(keys, family);
    LlamaConfig config;
    config.family = family.name;
    config.qkv_bias = family.qkv_bias;
    config.qk_norm = family.qk_norm;
    config.layers = keys.integer("num_hidden_layers", kMaxLayers);
    config.hidden = keys.integer("hidden_size");
    config.heads = keys.integer("num_attention_heads");
    config.kv_heads = keys.has("num_key_value_heads") ? keys.integer("num_key_value_heads")
                      : family.kv_heads == 0 || keys.is_null("num_key_value_heads") ? config.heads
                                                                                    : family.kv_heads;
    config.head_size = keys.has("head_dim") ? keys.integer("head_dim") : family.head_dim;
    if (config.head_size * config.heads == config.hidden) config.head_size = 0;
    config.ffn = keys.integer("intermediate_size");
    config.vocab = keys.integer("vocab_size");
    config.norm_eps = keys.real("rms_norm_eps");
    config.tied = keys.flag("tie_word_embeddings", false);
    if (keys.has("max_position_embeddings")) config.context = keys.integer("max_position_embeddings");
    read_rope(keys, config);
    if (family.experts) config.experts = read_experts(keys, family);
    refuse_windows(keys, family, config.layers);
    check_config(config, {.where = path + ": ",
                          .layers = "num_hidden_layers",
                          .hidden = "hidden_size",
                          .heads = "num_attention_heads",
                          .kv_heads = "num_key_value_heads",
                          .ffn = "intermediate_size",
                          .vocab = "vocab_size",
                          .head_dim = "head_dim",
                          .experts = experts_key(keys, family),
                          .top_k = "num_experts_per_tok",
                          .dense_layers = family.sigmoid ? "first_k_dense_replace" : "mlp_only_layers of length",
                          .groups = "n_group",
                          .top_groups = "topk_group"});
    return config;
}

}  // namespace train70b
