// What a mixture of experts is in Hugging Face's format: which family has it, its names of tensors, its keys.
#include <numeric>

#include "01_single_gpu/complete/hf/families.h"
#include "01_single_gpu/core/json.h"

namespace train70b {

void check_hf_family(const LlamaConfig& c, const std::string& flag) {
    const ExpertsConfig& x = c.experts;
    if (x.count == 0) return;
    const auto refuse = [&](const std::string& what, const std::string& instead) {
        usage_error("{}: no family of Hugging Face has experts with {} (try {})", flag, what, instead);
    };
    if (c.qkv_bias) refuse("--qkv-bias on", "--qkv-bias off");
    if (c.is_latent() && !x.sigmoid) refuse("--kv-lora-rank and --router softmax", "--router sigmoid");
    if (x.sigmoid) {  // dots.llm1, DeepSeek-V3
        if ((!c.qk_norm && !c.is_latent()) || x.shared == 0)
            refuse(fmt::format("--router sigmoid, --qk-norm {} and --shared-experts {}", c.qk_norm ? "on" : "off",
                               x.shared),
                   c.is_latent() ? "--shared-experts 1" : "--qk-norm on --shared-experts 1, as in dots.llm1");
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

// Experts one by one, gate and up by themselves.
std::vector<HfTensor> hf_tensors_of_experts(const Param& param, const LlamaConfig& config) {
    const int64_t rows = param.global_shape[0], N = config.experts.count;
    const bool mixtral = family_of(config).name == std::string("mixtral");
    const size_t at = param.name.find(".mlp.");
    const std::string mlp = param.name.substr(0, at) + (mixtral ? ".block_sparse_moe." : ".mlp.");
    if (param.name.ends_with(".mlp.gate.weight")) return {rows_of(param, mlp + "gate.weight", 0, rows)};
    if (!param.over_ep) return {rows_of(param, param.name, 0, rows)};
    std::vector<const char*> names = {mixtral ? "w2" : "down_proj"};
    if (param.name.ends_with(".gate_up_proj")) names = {mixtral ? "w1" : "gate_proj", mixtral ? "w3" : "up_proj"};
    std::vector<HfTensor> parts;
    const int64_t rows_of_part = rows / (N * int64_t(names.size()));
    for (int64_t expert = 0; expert < N; ++expert)
        for (const char* name : names)
            parts.push_back(rows_of(param, fmt::format("{}experts.{}.{}.weight", mlp, expert, name),
                                    int64_t(parts.size()) * rows_of_part, rows_of_part));
    return parts;
}

HfTensor hf_stacked(const Param& param, const LlamaConfig& config) {
    HfTensor whole = rows_of(param, param.name, 0, param.global_shape[0]);
    const int64_t N = config.experts.count;
    if (param.over_ep) whole.shape = {N, whole.rows / N, whole.shape[1]};
    return whole;
}

void add_expert_keys(nlohmann::ordered_json& json, const LlamaConfig& config) {
    const ExpertsConfig& x = config.experts;
    if (family_of(config).name == std::string("mixtral")) {
        json["intermediate_size"] = x.ffn;
        json["num_local_experts"] = x.count;
        json["num_experts_per_tok"] = x.top_k;
        json["router_aux_loss_coef"] = x.balance.aux_loss;
    } else if (x.sigmoid) {
        json.update({{"n_routed_experts", x.count},
                     {"n_shared_experts", x.shared},
                     {"num_experts_per_tok", x.top_k},
                     {"moe_intermediate_size", x.ffn},
                     {"norm_topk_prob", x.normalize},
                     {"n_group", x.groups},
                     {"topk_group", x.top_groups},
                     {"routed_scaling_factor", x.scale},
                     {"first_k_dense_replace", x.dense_layers}});
    } else {
        std::vector<int64_t> dense(size_t(x.dense_layers));
        std::iota(dense.begin(), dense.end(), 0);
        json.update({{"num_experts", x.count},
                     {"num_experts_per_tok", x.top_k},
                     {"moe_intermediate_size", x.ffn},
                     {"norm_topk_prob", x.normalize},
                     {"decoder_sparse_step", 1},
                     {"router_aux_loss_coef", x.balance.aux_loss},
                     {"mlp_only_layers", dense}});
    }
}

}  // namespace train70b
