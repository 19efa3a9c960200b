// Reads the config.json of Hugging Face's Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE, dots.llm1 and DeepSeek-V3.
// What a file leaves out has the default of the family's class in transformers.
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

// What training does not depend on, beside names with a leading "_": who wrote the file, initial values, the numbers of
// special tokens, how transformers generates.
constexpr std::string_view kIrrelevant =
    " architectures auto_map bos_token_id do_sample dtype eos_token_id id2label initializer_range is_llama_config "
    "label2id length_penalty max_length max_sequence_length num_beam_groups num_beams num_labels num_return_sequences "
    "output_attentions output_hidden_states output_router_logits pad_token_id pretraining_tp repetition_penalty "
    "return_dict temperature tokenizer_class top_k top_p torch_dtype transformers.js_config transformers_version "
    "typical_p unsloth_fixed unsloth_version use_cache ";

// Usage error for a key that nothing has read and that is not to be ignored; removes those found from `ignored`.
// where: "rope_scaling." inside of it.
void refuse_others(const JsonObject& keys, const std::string& where, std::vector<std::string>& ignored) {
    for (const std::string& key : keys.unread()) {
        if (where.empty() && (key.starts_with('_') || kIrrelevant.find(" " + key + " ") != kIrrelevant.npos)) continue;
        if (std::erase(ignored, where + key) == 0)
            keys.refuse(key.c_str(), fmt::format("is not supported (--hf-ignore {}{} leaves it out)", where, key));
    }
}

struct RopeKeys {
    std::optional<double> theta;
    std::optional<RopeScaling> scaling;
};

RopeKeys read_rope_object(const JsonObject& rope) {
    for (const auto& [name, value] : rope.json().items())
        if (value.is_object()) rope.refuse(name.c_str(), "only one set of parameters, for all layers, is supported");
    RopeKeys found;
    if (rope.has("rope_theta")) found.theta = read_theta(rope);
    rope.only("partial_rotary_factor", 1.0, "only 1.0 is supported");
    const char* type_key = rope.has("rope_type") ? "rope_type" : "type";
    if (!rope.has(type_key) && !rope.has("factor")) return found;
    const std::string type = rope.text(type_key);
    rope.only("type", type, "conflicts with rope_type (must be one of the two)");
    if (type == "linear") found.scaling = RopeScaling{.factor = read_factor(rope), .linear = true};
    if (type == "linear" || type == "default") return found;
    if (type != "llama3") rope.refuse(type_key, "only \"default\", \"linear\" and \"llama3\" are supported");
    const RopeScaling s{read_factor(rope), rope.real("low_freq_factor", 1e-6, 1e6),
                        rope.real("high_freq_factor", 1e-6, 1e6), rope.integer("original_max_position_embeddings")};
    if (!(s.low_freq_factor < s.high_freq_factor))
        rope.refuse("low_freq_factor", fmt::format("must be less than high_freq_factor {}", s.high_freq_factor));
    found.scaling = s;
    return found;
}

// Reads both versions of the format: rope_theta and rope_scaling, or rope_parameters with all of it; or both, if equal.
void read_rope(const JsonObject& keys, LlamaConfig& config, std::vector<std::string>& ignored) {
    std::optional<double> theta;
    if (keys.has("rope_theta")) theta = read_theta(keys);
    for (const char* key : {"rope_scaling", "rope_parameters"}) {
        if (!keys.has(key)) continue;
        const JsonObject rope = keys.inner(key);
        const RopeKeys found = read_rope_object(rope);
        refuse_others(rope, key + std::string("."), ignored);
        if (found.theta && theta.value_or(*found.theta) != *found.theta)
            keys.refuse("rope_theta", fmt::format("but {} has {}", key, *found.theta));
        if (found.theta) theta = found.theta;
        if (key == std::string("rope_parameters") && keys.has("rope_scaling") && found.scaling != config.rope_scaling)
            keys.refuse("rope_scaling", "conflicts with rope_parameters (must be one of the two, or equal)");
        config.rope_scaling = found.scaling;
    }
    if (theta) config.rope_theta = *theta;
}

const Family& family_of(const JsonObject& keys) {
    const std::string name = keys.has("model_type") ? keys.text("model_type") : "llama";
    for (const Family& family : kFamilies)
        if (name == family.name) return family;
    std::string names;
    for (const Family& family : kFamilies) names += fmt::format("{}\"{}\"", names.empty() ? "" : ", ", family.name);
    keys.refuse("model_type", fmt::format("only {} are supported", names));
}

// Windows, and which layers have one. Usage error for other kinds of attention.
void read_windows(const JsonObject& keys, const Family& family, LlamaConfig& config) {
    const std::string name = family.name;
    bool windows = name != "llama" && name != "mixtral" && !keys.is_null("sliding_window");
    if (name == "mixtral" || family.latent) windows = keys.has("sliding_window");
    if (name.starts_with("qwen")) windows = keys.flag("use_sliding_window", false) && windows;
    const bool bounded = keys.has("max_window_layers") && family.full_layers > 0;
    const int64_t first = bounded ? keys.integer("max_window_layers", kMaxLayers, 0) : family.full_layers;
    std::vector<bool> windowed;
    for (int64_t layer = 0; layer < config.layers; ++layer) windowed.push_back(layer >= first);
    for (const char* key : {"layer_types", kOwnLayerTypes}) {
        if (!keys.has(key)) continue;
        const bool counts = family.layer_types || key == kOwnLayerTypes;
        std::vector<bool> listed;
        for (const json& type : keys.list(key)) {
            listed.push_back(type == "sliding_attention");
            if (type != "full_attention" && !(listed.back() && windows && counts))
                keys.refuse(key, "must be \"full_attention\", or \"sliding_attention\" and its window");
        }
        if (counts && int64_t(listed.size()) != config.layers)
            keys.refuse(key, fmt::format("must have num_hidden_layers, {}, entries", config.layers));
        if (counts) windowed = listed;
    }
    const auto count = std::count(windowed.begin(), windowed.end(), true);
    if (!windows || count == 0) return;
    config.window = keys.has("sliding_window") ? keys.integer("sliding_window") : 4096;
    if (count < config.layers) config.windowed = windowed;
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
    const char* aux_loss = "router_aux_loss_coef";
    x.balance.aux_loss = keys.has(aux_loss) && keys.any_number(aux_loss) != 0 ? keys.real(aux_loss, 0, 1e6) : 0;
    if (family.name == std::string("mixtral")) {
        keys.only("router_jitter_noise", 0.0, "only 0.0 is supported");
        x.ffn = keys.integer("intermediate_size");
        return x;
    }
    x.ffn = keys.integer("moe_intermediate_size");
    x.normalize = keys.flag("norm_topk_prob", family.latent);
    if (family.sigmoid) {
        x.sigmoid = true;
        x.shared = keys.integer("n_shared_experts", kMaxExperts);
        if (family.latent) x.groups = 8, x.top_groups = 4, x.scale = 2.5, x.dense_layers = 3;  // its defaults
        if (keys.has("n_group")) x.groups = keys.integer("n_group");
        if (keys.has("topk_group")) x.top_groups = keys.integer("topk_group");
        if (keys.has("routed_scaling_factor")) x.scale = keys.real("routed_scaling_factor", 1e-6, 1000);
        if (keys.has("first_k_dense_replace")) x.dense_layers = keys.integer("first_k_dense_replace", kMaxLayers, 0);
        if (x.groups > x.count / 2)
            keys.refuse("n_group", fmt::format("needs two experts or more per group, but there are {}", x.count));
        if (keys.has("scoring_func")) (void)keys.text("scoring_func", {"sigmoid", "noaux_tc"});
        keys.only("topk_method", "noaux_tc", "only \"noaux_tc\" is supported");
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

void read_latent(const JsonObject& keys, LlamaConfig& config) {
    constexpr int64_t kMost = 1 << 20;
    const bool direct = keys.is_null("q_lora_rank");
    config.latent = {keys.integer("kv_lora_rank", kMost), direct ? 0 : keys.integer("q_lora_rank", kMost),
                     keys.integer("qk_rope_head_dim", kMost)};
    config.head_size = keys.integer("v_head_dim", kMost);
    if (keys.integer("qk_nope_head_dim", kMost) != config.head_size)
        keys.refuse("qk_nope_head_dim", fmt::format("only v_head_dim, {}, is supported", config.head_size));
    keys.only("head_dim", config.latent.rope_dim, "only that of qk_rope_head_dim is supported");
    keys.only("qk_head_dim", config.head_dim(), "only qk_nope_head_dim + qk_rope_head_dim is supported");
    keys.only("rope_interleave", true, "only true is supported");
    // The module that predicts further tokens is left out (HfWeights), as transformers leaves it out.
    if (keys.has("num_nextn_predict_layers")) (void)keys.integer("num_nextn_predict_layers", 1, 0);
}

}  // namespace

LlamaConfig read_hf_config(const std::string& dir, const std::vector<std::string>& ignored) {
    const std::string path = dir + "/config.json";
    std::error_code error;
    check_hf_folder(dir);
    LlamaConfig config = parse_hf_config(read_json(path, path, "must be next to the weights"), path, ignored);
    config.name = std::filesystem::weakly_canonical(dir, error).filename().string();
    return config;
}

LlamaConfig parse_hf_config(const json& object, const std::string& path, std::vector<std::string> ignored) {
    const JsonObject keys(path, object);
    const Family& family = family_of(keys);
    keys.only("hidden_act", "silu", "only \"silu\" is supported");
    // Llama's and Qwen3's also means a bias of o_proj; Qwen2 has its biases without this key.
    if (!family.qkv_bias) keys.only("attention_bias", false, "a bias of o_proj is not supported");
    keys.only("partial_rotary_factor", 1.0, "only 1.0 is supported");
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
    if (family.latent)
        read_latent(keys, config);
    else
        config.head_size = keys.has("head_dim") ? keys.integer("head_dim") : family.head_dim;
    if (config.head_size * config.heads == config.hidden) config.head_size = 0;
    config.ffn = keys.integer("intermediate_size");
    config.vocab = keys.integer("vocab_size");
    config.norm_eps = keys.has("rms_norm_eps") ? keys.real("rms_norm_eps", 1e-30, 1) : family.norm_eps;
    config.tied = keys.flag("tie_word_embeddings", false);
    config.context = keys.has("max_position_embeddings") ? keys.integer("max_position_embeddings") : family.context;
    config.rope_theta = family.rope_theta;
    read_rope(keys, config, ignored);
    const bool dense = family.latent && keys.has("first_k_dense_replace") &&
                       keys.integer("first_k_dense_replace", kMaxLayers, 0) >= config.layers;
    if (family.experts && (!dense || keys.has("n_routed_experts"))) config.experts = read_experts(keys, family);
    if (dense) config.experts = {};
    read_windows(keys, family, config);
    config.sinks = keys.flag(kOwnSinks, false);
    config.multi_token = keys.flag(kOwnMultiToken, false);
    refuse_others(keys, "", ignored);
    for (const std::string& key : ignored)
        if (key != "vocab_size") usage_error("--hf-ignore {}: {} has no such key, or it is not in the way", key, path);
    json kept = json::object();
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id", "use_sliding_window", "sliding_window",
                            "max_window_layers", "layer_types"})
        if ((config.window > 0 || std::string(key).ends_with("_token_id")) && object.contains(key) &&
            (family.layer_types || key != std::string("layer_types")))  // which others ignore
            kept[key] = object[key];
    if (config.window > 0) kept["sliding_window"] = config.window;
    if (!kept.empty()) config.kept = kept.dump();
    check_config(config, {.where = path + ": ",
                          .layers = "num_hidden_layers",
                          .hidden = "hidden_size",
                          .heads = "num_attention_heads",
                          .kv_heads = "num_key_value_heads",
                          .ffn = "intermediate_size",
                          .vocab = "vocab_size",
                          .head_dim = "head_dim",
                          .window = "sliding_window",
                          .kv_rank = "kv_lora_rank",
                          .rope_dim = "qk_rope_head_dim",
                          .experts = experts_key(keys, family),
                          .top_k = "num_experts_per_tok",
                          .dense_layers = family.sigmoid ? "first_k_dense_replace" : "mlp_only_layers of length",
                          .groups = "n_group",
                          .top_groups = "topk_group"});
    return config;
}

}  // namespace train70b
