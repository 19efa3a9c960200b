// What a model of this course is in Hugging Face's format: its family, config.json and names of tensors.
#include "01_single_gpu/complete/hf/families.h"

#include <algorithm>
#include <numeric>

#include "01_single_gpu/core/json.h"

namespace train70b {

using nlohmann::ordered_json;

const std::vector<Family> kFamilies = {{"llama", "LlamaForCausalLM", 0, 0, false, false, false},
                                       {"mistral", "MistralForCausalLM", 8, 0, false, false, false},
                                       {"qwen2", "Qwen2ForCausalLM", 32, 0, true, false, false},
                                       {"qwen3", "Qwen3ForCausalLM", 32, 128, false, true, false},
                                       {"mixtral", "MixtralForCausalLM", 8, 0, false, false, true},
                                       {"qwen3_moe", "Qwen3MoeForCausalLM", 4, 0, false, true, true},
                                       {"dots1", "Dots1ForCausalLM", 32, 0, false, true, true, true}};

// Mistral without a window is the same model as Llama, whose class insists on a hidden size that is divisible by the
// heads.
const Family& family_of(const LlamaConfig& c) {
    const auto fits = [&c](const Family& family) {
        return family.qkv_bias == c.qkv_bias && family.qk_norm == c.qk_norm &&
               family.experts == (c.experts.count > 0) && family.sigmoid == c.experts.sigmoid &&
               (c.family.empty() ? family.name != std::string("llama") || c.hidden % c.heads == 0
                                 : family.name == c.family);
    };
    const auto found = std::find_if(kFamilies.begin(), kFamilies.end(), fits);
    CHECK(found != kFamilies.end(), "{} with biases {} and norms of q and k {}", c.family, c.qkv_bias, c.qk_norm);
    return *found;
}

namespace {

// Rows [begin, begin + rows) of a parameter under a name of their own.
HfTensor rows_of(const Param& param, std::string name, int64_t begin, int64_t rows) {
    Shape shape = param.global_shape;
    shape[0] = rows;
    return {std::move(name), std::move(shape), begin, rows};
}

}  // namespace

void check_hf_family(const LlamaConfig& c, const std::string& flag) {
    const ExpertsConfig& x = c.experts;
    if (x.count == 0) return;
    const auto refuse = [&](const std::string& what, const std::string& instead) {
        usage_error("{}: no family of Hugging Face has experts with {} (try {})", flag, what, instead);
    };
    if (c.qkv_bias) refuse("--qkv-bias on", "--qkv-bias off");
    if (x.sigmoid) {  // dots.llm1
        if (!c.qk_norm || x.shared == 0)
            refuse(fmt::format("--router sigmoid, --qk-norm {} and --shared-experts {}", c.qk_norm ? "on" : "off",
                               x.shared),
                   "--qk-norm on --shared-experts 1, as in dots.llm1");
        if (x.groups > x.count / 2)
            refuse(fmt::format("--expert-groups {}, one expert in each,", x.groups), "--expert-groups 1");
        return;
    }
    if (x.shared > 0) refuse(fmt::format("--shared-experts {}", x.shared), "--shared-experts 0");
    if (x.groups > 1) refuse(fmt::format("--expert-groups {}", x.groups), "--expert-groups 1");
    if (x.scale != 1) refuse(fmt::format("--router-scale {}", x.scale), "--router-scale 1");
    if (!x.normalize && !c.qk_norm) refuse("--router-normalize off and --qk-norm off", "--qk-norm on, as in Qwen3-MoE");
    if (x.dense_layers > 0 && !c.qk_norm)
        refuse(fmt::format("--dense-layers {} and --qk-norm off", x.dense_layers), "--qk-norm on, as in Qwen3-MoE");
}

std::vector<HfTensor> hf_tensors(const Param& param, const LlamaConfig& config) {
    const int64_t rows = param.global_shape[0], N = config.experts.count;
    if (N == 0) return {rows_of(param, param.name, 0, rows)};
    const bool mixtral = family_of(config).name == std::string("mixtral");
    const size_t at = param.name.find(".mlp.");
    const std::string mlp = param.name.substr(0, at) + (mixtral ? ".block_sparse_moe." : ".mlp.");
    if (param.name.ends_with(".mlp.gate.weight")) return {rows_of(param, mlp + "gate.weight", 0, rows)};
    if (!param.of_experts) return {rows_of(param, param.name, 0, rows)};
    std::vector<const char*> names = {mixtral ? "w2" : "down_proj"};
    if (param.name.ends_with(".gate_up_proj")) names = {mixtral ? "w1" : "gate_proj", mixtral ? "w3" : "up_proj"};
    std::vector<HfTensor> parts;
    const int64_t each = rows / (N * int64_t(names.size()));
    for (int64_t expert = 0; expert < N; ++expert)
        for (const char* name : names)
            parts.push_back(rows_of(param, fmt::format("{}experts.{}.{}.weight", mlp, expert, name),
                                    int64_t(parts.size()) * each, each));
    return parts;
}

HfTensor hf_stacked(const Param& param, const LlamaConfig& config) {
    HfTensor whole = rows_of(param, param.name, 0, param.global_shape[0]);
    const int64_t N = config.experts.count;
    if (param.of_experts) whole.shape = {N, whole.rows / N, whole.shape[1]};
    return whole;
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
    if (name != "llama") json.erase("mlp_bias"), json["sliding_window"] = nullptr;
    if (name.starts_with("qwen")) json["use_sliding_window"] = false;
    if (name.starts_with("mi")) json.erase("attention_bias");
    const ExpertsConfig& x = c.experts;
    if (name == "mixtral") {
        json["intermediate_size"] = x.ffn;
        json["num_local_experts"] = x.count;
        json["num_experts_per_tok"] = x.top_k;
    } else if (family.sigmoid) {
        json.update({{"n_routed_experts", x.count},
                     {"n_shared_experts", x.shared},
                     {"num_experts_per_tok", x.top_k},
                     {"moe_intermediate_size", x.ffn},
                     {"norm_topk_prob", x.normalize},
                     {"n_group", x.groups},
                     {"topk_group", x.top_groups},
                     {"routed_scaling_factor", x.scale},
                     {"first_k_dense_replace", x.dense_layers}});
    } else if (family.experts) {
        std::vector<int64_t> dense(size_t(x.dense_layers));
        std::iota(dense.begin(), dense.end(), 0);
        json.update({{"num_experts", x.count},
                     {"num_experts_per_tok", x.top_k},
                     {"moe_intermediate_size", x.ffn},
                     {"norm_topk_prob", x.normalize},
                     {"decoder_sparse_step", 1},
                     {"mlp_only_layers", dense}});
    }
    if (c.context > 0) json["max_position_embeddings"] = c.context;
    if (c.rope_scaling && c.rope_scaling->linear)
        json["rope_scaling"] = {{"rope_type", "linear"}, {"factor", c.rope_scaling->factor}};
    else if (c.rope_scaling)
        json["rope_scaling"] = {{"rope_type", "llama3"},
                                {"factor", c.rope_scaling->factor},
                                {"low_freq_factor", c.rope_scaling->low_freq_factor},
                                {"high_freq_factor", c.rope_scaling->high_freq_factor},
                                {"original_max_position_embeddings", c.rope_scaling->original_context}};
    return json;
}

}  // namespace train70b
