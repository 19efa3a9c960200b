// Reads and writes the config.json of a Hugging Face Llama.
#include <cmath>
#include <filesystem>

#include "01_single_gpu/io/hf.h"
#include "01_single_gpu/io/json.h"

namespace train70b {

using nlohmann::json;
using nlohmann::ordered_json;

namespace {

// Typed access to the keys of a JSON object; null counts as absent, as in Hugging Face's files.
class Keys {
  public:
    Keys(std::string file, json object) : file_(std::move(file)), object_(std::move(object)) {
        if (!object_.is_object()) usage_error("{}: is not a JSON object", file_);
    }

    bool has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }

    int64_t integer(const char* key, int64_t max = INT32_MAX) const {
        const json& value = needed(key);
        if (!value.is_number_unsigned() || value.get<uint64_t>() < 1 || value.get<uint64_t>() > uint64_t(max))
            refuse(key, fmt::format("must be an integer from 1 to {}", max));
        return value.get<int64_t>();
    }
    double real(const char* key) const {
        const json& value = needed(key);
        if (!value.is_number() || !(value.get<double>() > 0) || !std::isfinite(value.get<double>()))
            refuse(key, "must be a number > 0");
        return value.get<double>();
    }
    std::string text(const char* key) const {
        const json& value = needed(key);
        if (!value.is_string()) refuse(key, "must be a string");
        return value.get<std::string>();
    }
    // Usage error unless the key is absent or has this value.
    void only(const char* key, const json& value, const char* why) const {
        if (has(key) && object_[key] != value) refuse(key, why);
    }
    Keys inner(const char* key) const {
        if (!needed(key).is_object()) refuse(key, "must be an object or null");
        return Keys(file_ + ": " + key, object_[key]);
    }
    [[noreturn]] void refuse(const char* key, const std::string& why) const {
        std::string value = object_.contains(key) ? object_[key].dump() : "";
        if (value.size() > 60) value = "...";
        usage_error("{}: {} {}{}{}", file_, key, value, value.empty() ? "" : ": ", why);
    }

  private:
    const json& needed(const char* key) const {
        if (!has(key)) usage_error("{}: {} is missing", file_, key);
        return object_[key];
    }

    std::string file_;
    json object_;
};

// Reads both versions of the format: rope_theta and rope_scaling, or rope_parameters with all of it.
void read_rope(const Keys& keys, LlamaConfig& config) {
    if (keys.has("rope_theta")) config.rope_theta = keys.real("rope_theta");
    if (keys.has("rope_scaling") && keys.has("rope_parameters"))
        keys.refuse("rope_scaling", "conflicts with rope_parameters (must be one of the two)");
    const char* key = keys.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
    if (!keys.has(key)) return;
    const Keys rope = keys.inner(key);
    if (rope.has("rope_theta")) {
        const double theta = rope.real("rope_theta");
        if (keys.has("rope_theta") && theta != config.rope_theta)
            keys.refuse("rope_theta", fmt::format("but {} has {}", key, theta));
        config.rope_theta = theta;
    }
    rope.only("partial_rotary_factor", 1.0, "only 1.0 is supported");
    const char* type_key = rope.has("rope_type") ? "rope_type" : "type";
    if (!rope.has(type_key) && !rope.has("factor")) return;
    const std::string type = rope.text(type_key);
    if (type == "default") return;
    if (type != "llama3") rope.refuse(type_key, "only \"default\" and \"llama3\" are supported");
    const RopeScaling s{rope.real("factor"), rope.real("low_freq_factor"), rope.real("high_freq_factor"),
                        rope.integer("original_max_position_embeddings")};
    if (!(s.low_freq_factor < s.high_freq_factor))
        rope.refuse("low_freq_factor", fmt::format("must be less than high_freq_factor {}", s.high_freq_factor));
    config.rope_scaling = s;
}

void refuse_other_models(const Keys& keys) {
    keys.only("model_type", "llama", "only \"llama\" is supported");
    keys.only("hidden_act", "silu", "only \"silu\" is supported");
    keys.only("attention_bias", false, "biases are not supported");
    keys.only("mlp_bias", false, "biases are not supported");
    keys.only("tie_word_embeddings", false,
              "tied embeddings are not supported (save the model with a separate lm_head.weight)");
    keys.only("partial_rotary_factor", 1.0, "only 1.0 is supported");
    if (keys.has("quantization_config")) keys.refuse("quantization_config", "quantized weights are not supported");
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
    const Keys keys(path, object);
    refuse_other_models(keys);
    LlamaConfig config;
    config.layers = keys.integer("num_hidden_layers", kMaxLayers);
    config.hidden = keys.integer("hidden_size");
    config.heads = keys.integer("num_attention_heads");
    config.kv_heads = keys.has("num_key_value_heads") ? keys.integer("num_key_value_heads") : config.heads;
    config.ffn = keys.integer("intermediate_size");
    config.vocab = keys.integer("vocab_size");
    config.norm_eps = keys.real("rms_norm_eps");
    if (keys.has("max_position_embeddings")) config.context = keys.integer("max_position_embeddings");
    read_rope(keys, config);
    check_config(config, {.where = path + ": ",
                          .layers = "num_hidden_layers",
                          .hidden = "hidden_size",
                          .heads = "num_attention_heads",
                          .kv_heads = "num_key_value_heads",
                          .ffn = "intermediate_size",
                          .vocab = "vocab_size"});
    if (keys.has("head_dim") && keys.integer("head_dim") != config.head_dim())
        keys.refuse("head_dim", fmt::format("must be hidden_size / num_attention_heads = {}", config.head_dim()));
    return config;
}

ordered_json hf_config(const LlamaConfig& c, DType dtype) {
    ordered_json json = {{"architectures", {"LlamaForCausalLM"}},
                         {"model_type", "llama"},
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
                         {"tie_word_embeddings", false},
                         {"torch_dtype", dtype == DType::bf16  ? "bfloat16"
                                         : dtype == DType::f64 ? "float64"
                                                               : "float32"}};
    if (c.context > 0) json["max_position_embeddings"] = c.context;
    if (c.rope_scaling)
        json["rope_scaling"] = {{"rope_type", "llama3"},
                                {"factor", c.rope_scaling->factor},
                                {"low_freq_factor", c.rope_scaling->low_freq_factor},
                                {"high_freq_factor", c.rope_scaling->high_freq_factor},
                                {"original_max_position_embeddings", c.rope_scaling->original_context}};
    return json;
}

}  // namespace train70b
