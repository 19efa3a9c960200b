#include "01_single_gpu/flags/model_flags.h"

#include <numeric>

namespace train70b {

const std::vector<std::string>& ModelFlags::names() {
    static const std::vector<std::string> list = {"--model",    "--layers",   "--hidden",         "--heads",
                                                  "--kv-heads", "--head-dim", "--qkv-bias",       "--qk-norm",
                                                  "--ffn",      "--vocab",    "--tied-embeddings"};
    return list;
}

void ModelFlags::add_to(Flags& flags) {
    const Check count = integer_from(1);
    flags.group("Model");
    flags.add("--model", model_, "model preset", one_of(preset_names()));
    flags.add("--layers", layers_, "number of transformer blocks", integer_from(1, kMaxLayers));
    flags.add("--hidden", hidden_, "hidden size", count);
    flags.add("--heads", heads_, "number of query heads", count);
    flags.add("--kv-heads", kv_heads_, "number of key/value heads; must divide --heads", count);
    flags.add("--head-dim", head_dim_, "size of a head [default: --hidden / --heads]", count).default_text("");
    const auto add_choice = [&](const std::string& flag, std::optional<bool>& value, const std::string& text) {
        flags
            .add_word(
                flag, [&value](const std::string& word) { value = word == "on"; }, text + " [default: the model's]",
                one_of({"on", "off"}))
            .default_text("");
    };
    add_choice("--qkv-bias", qkv_bias_, "biases of q, k and v, as in Qwen2");
    add_choice("--qk-norm", qk_norm_, "RMSNorm of each head of q and k, as in Qwen3");
    flags.add("--ffn", ffn_, "inner size of the MLP", count);
    flags.add("--vocab", vocab_, "vocabulary size (256 for text, whose tokens are bytes)", count);
    flags.add_switch("--tied-embeddings", tied_, "use the embedding's matrix for the head as well")
        .default_text("the model's");
}

LlamaConfig ModelFlags::shape(const Flags& flags) const {
    LlamaConfig model = preset(model_);
    if (layers_) model.layers = *layers_;
    if (hidden_) model.hidden = *hidden_;
    if (heads_) model.heads = *heads_;
    if (heads_ && !kv_heads_) model.kv_heads = std::gcd(model.heads, model.kv_heads);
    if (kv_heads_) model.kv_heads = *kv_heads_;
    if (head_dim_) model.head_size = *head_dim_;
    if (qkv_bias_) model.qkv_bias = *qkv_bias_;
    if (qk_norm_) model.qk_norm = *qk_norm_;
    if (ffn_) model.ffn = *ffn_;
    if (vocab_) model.vocab = *vocab_;
    if (flags.given("--tied-embeddings")) model.tied = tied_;
    check_config(model);
    return model;
}

}  // namespace train70b
