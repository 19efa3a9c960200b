#include "01_single_gpu/complete/multi_token.h"

#include "01_single_gpu/complete/llama.h"

namespace train70b {

MultiToken::MultiToken(const LlamaConfig& c, double init_std) : eps_(c.norm_eps) {
    const std::string prefix = fmt::format("model.layers.{}.", c.layers);  // DeepSeek-V3's names
    embedding_norm = make_param(prefix + "enorm.weight", {c.hidden}, 0);
    hidden_norm = make_param(prefix + "hnorm.weight", {c.hidden}, 0);
    project = make_param(prefix + "eh_proj.weight", {c.hidden, 2 * c.hidden}, init_std);
    norm = make_param(prefix + "shared_head.norm.weight", {c.hidden}, 0);
    projection.weights = {&project};
}

// hidden: behind the final norm. (1): what it adds to the loss.
Var Llama::multi_token_loss(Tape& tape, const Var& hidden, const Batch& batch) {
    Batch next = batch;
    next.tokens = batch.next_tokens;
    next.targets = batch.next_targets;
    next.order = batch.next_order;
    next.loss_scale *= options.multi_token_weight;
    const Var embedded = multi_token->embedding_unit.run(
        tape, {}, [this, next](Tape& t, const Var&) { return tensor_parallel->embedding(t, next, embed_tokens); });
    const Var out = blocks.back().unit.run(
        tape, hidden, [this, embedded, next, choice = blocks.back().feed_forward->new_choice()](Tape& t, const Var& h) {
            const Var u = multi_token->input(t, embedded, h);
            return rmsnorm(t, blocks.back().body(t, u, next, *tensor_parallel, choice), multi_token->norm,
                           config.norm_eps);
        });
    return multi_token->head_unit.run(tape, out, [this, next](Tape& t, const Var& normed) {
        return loss_of(t, tensor_parallel->f(t, normed, head), next, multi_token->head_unit,
                       {.logit_scale = loss_options.logit_scale});
    });
}

}  // namespace train70b
