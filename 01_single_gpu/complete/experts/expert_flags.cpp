#include "01_single_gpu/complete/experts/expert_flags.h"

#include <algorithm>

#include "01_single_gpu/complete/hf/hf.h"

namespace train70b {

const std::vector<std::string>& ExpertFlags::names() {
    static const std::vector<std::string> list = {
        "--experts",          "--top-k",        "--expert-ffn",    "--shared-experts", "--dense-layers", "--router",
        "--router-normalize", "--router-scale", "--expert-groups", "--top-groups",     kCapacity};
    return list;
}

void ExpertFlags::add_shape(Flags& flags) {
    const Check count = integer_from(1);
    flags.group("Experts");
    flags
        .add("--experts", experts_.count, "experts of each layer, in place of its MLP [default: the model's]",
             integer_from(1, 1 << 14))
        .default_text("");
    flags.add("--top-k", experts_.top_k, "experts of each token", count);
    flags.add("--expert-ffn", experts_.ffn, "inner size of an expert [default: --ffn / --top-k, rounded down]", count)
        .default_text("ffn / top-k");
    flags.add("--shared-experts", experts_.shared, "experts of all tokens, as one MLP", integer_from(0));
    flags.add("--dense-layers", experts_.dense_layers, "first layers, which keep the MLP", integer_from(0));
    flags.add("--router", router_, "scores of the experts: of all together, or each by itself",
              one_of({"softmax", "sigmoid"}));
    flags.add_switch("--router-normalize", experts_.normalize, "weights of a token's experts sum to --router-scale");
    flags.add("--router-scale", experts_.scale, "factor of the weights", real_number(0, 1000, false));
    flags.add("--expert-groups", experts_.groups, "groups of experts, of which a token chooses first", count);
    flags.add("--top-groups", experts_.top_groups, "groups of each token, by the sum of their two best scores", count);
    flags.add(kCapacity, experts_.capacity_factor,
              "slots of an expert in each sequence, relative to an even load; further tokens are dropped; 0: no limit",
              real_number(0, kLargest));
}

void ExpertFlags::add_balance(Flags& flags) {
    const Check positive0 = real_number(0, kLargest);
    Balance& balance = experts_.balance;
    flags.add("--aux-loss", balance.aux_loss, "experts: coefficient of the loss that balances their load", positive0);
    flags.add("--aux-loss-over", aux_loss_over_,
              "what the load is counted over: each sequence, or the whole batch of the step before",
              one_of({"sequence", "batch"}));
    flags.add("--router-z-loss", balance.z_loss,
              "experts: add this times the mean square of log(sum of exp(router's logits)) to the loss", positive0);
    flags.add(
        "--router-bias-rate", balance.bias_rate,
        "experts: after a step, add this to the score of those with less than the mean load, subtract it from others",
        positive0);
}

ExpertsConfig ExpertFlags::shape(const LlamaConfig& model, const Flags& flags) const {
    const ExpertsConfig& preset = model.experts;
    if (!flags.given("--experts") && preset.count == 0) {
        for (const std::string& flag : names())
            if (flags.given(flag)) usage_error("{}: needs --experts N", flag);
        return {};
    }
    ExpertsConfig experts = experts_;
    experts.sigmoid = router_ == "sigmoid";
    if (!flags.given("--experts")) experts.count = preset.count;
    if (preset.count > 0 && !flags.given("--top-k")) experts.top_k = preset.top_k;
    if (preset.count > 0 && !flags.given("--expert-ffn")) experts.ffn = preset.ffn;
    if (experts.top_k == 1 && experts.normalize && !flags.given("--router-normalize"))
        usage_error(
            "--top-k 1: a weight divided by itself is 1, and the router learns nothing from the loss (try "
            "--router-normalize off)");
    if (experts.ffn == 0)  // as many active parameters as the dense model
        experts.ffn = std::max<int64_t>(model.ffn / experts.top_k, 1);
    return experts;
}

void ExpertFlags::read_balance(LlamaConfig& model, const Flags& flags) const {
    const double of_file = model.experts.balance.aux_loss;
    Balance& balance = model.experts.balance = experts_.balance;
    if (flags.given("--load-hf") && !flags.given("--aux-loss")) balance.aux_loss = of_file;
    balance.of_batch = aux_loss_over_ == "batch";
    for (const char* flag : {"--aux-loss", "--aux-loss-over", "--router-z-loss", "--router-bias-rate"})
        if (flags.given(flag) && !model.is_sparse()) usage_error("{}: needs --experts N", flag);
    if (balance.of_batch && balance.aux_loss == 0)
        usage_error("--aux-loss-over batch: with --aux-loss 0 there is no such loss (try --aux-loss 0.01)");
    if (!model.is_sparse()) return;
    if (flags.given("--mup")) usage_error("--mup: not supported with --experts");
    for (const char* flag : {"--save-hf", "--save-reference"}) {
        if (!flags.given(flag)) continue;
        check_hf_family(model, flag);
        if (balance.bias_rate > 0 && !model.experts.sigmoid)
            usage_error(
                "{}: no family of Hugging Face stores the biases of --router-bias-rate with a softmax (try "
                "--router-bias-rate 0)",
                flag);
    }
}

}  // namespace train70b
