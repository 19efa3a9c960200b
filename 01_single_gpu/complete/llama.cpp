#include "01_single_gpu/complete/llama.h"

#include <cmath>
#include <utility>

namespace train70b {

FeedForward::FeedForward(const LlamaConfig& c, const std::string& prefix, int64_t width, double init_std,
                         double out_std) {
    if (width == 0) return;
    gate_proj = make_param(prefix + "gate_proj.weight", {width, c.hidden}, init_std);
    up_proj = make_param(prefix + "up_proj.weight", {width, c.hidden}, init_std);
    down_proj = make_param(prefix + "down_proj.weight", {c.hidden, width}, out_std);
    gate_up.weights = {&gate_proj, &up_proj};
    down.weights = {&down_proj};
}

Block::Block(const LlamaConfig& c, int64_t layer, double init_std)
    : rope_(c.rope()), head_dim_(c.head_dim()), eps_(c.norm_eps), window_(c.window_of(layer)) {
    const std::string prefix = fmt::format("model.layers.{}.", layer), self_attn = prefix + "self_attn.";
    const double out_std = init_std / std::sqrt(2.0 * c.layers);  // 2L branches are added to the residual stream
    const auto add = [this](Param& param, Param made) {
        param = std::move(made);
        unit.params.push_back(&param);
    };
    unit.name = fmt::format("block {}", layer);
    add(input_norm, make_param(prefix + "input_layernorm.weight", {c.hidden}, 0));
    if (c.is_latent()) {
        latent = std::make_unique<LatentAttention>(c, self_attn, init_std);
        for (Param* param : latent->params()) unit.params.push_back(param);
    } else {
        add(q_proj, make_param(self_attn + "q_proj.weight", {c.q_width(), c.hidden}, init_std));
        add(k_proj, make_param(self_attn + "k_proj.weight", {c.kv_width(), c.hidden}, init_std));
        add(v_proj, make_param(self_attn + "v_proj.weight", {c.kv_width(), c.hidden}, init_std));
        qkv.weights = {&q_proj, &k_proj, &v_proj};
    }
    if (c.qkv_bias) {
        add(q_bias, make_bias(self_attn + "q_proj.bias", c.q_width()));
        add(k_bias, make_bias(self_attn + "k_proj.bias", c.kv_width()));
        add(v_bias, make_bias(self_attn + "v_proj.bias", c.kv_width()));
        qkv.biases = {&q_bias, &k_bias, &v_bias};
    }
    if (c.qk_norm) {
        add(q_norm, make_param(self_attn + "q_norm.weight", {c.head_dim()}, 0));
        add(k_norm, make_param(self_attn + "k_norm.weight", {c.head_dim()}, 0));
        head_norms_ = {&q_norm, &k_norm, c.norm_eps};
    }
    if (c.sinks) add(sinks, make_param(self_attn + "sinks", {c.heads}, init_std));
    add(o_proj, make_param(self_attn + "o_proj.weight", {c.hidden, c.out_width()}, out_std));
    o.weights = {&o_proj};
    add(post_attention_norm, make_param(prefix + "post_attention_layernorm.weight", {c.hidden}, 0));
    feed_forward = make_feed_forward(c, layer, init_std, out_std);
    FeedForward& half = *feed_forward;
    for (Param* param : half.undivided()) unit.params.push_back(param);
    if (half.has_mlp()) unit.params.insert(unit.params.end(), {&half.gate_proj, &half.up_proj, &half.down_proj});
}

// A function of its own: what the tape does not save is freed when it returns.
Var Block::attention_half(Tape& tape, const Var& x, const Batch& batch, const TensorParallelOps& tensor_parallel) {
    const bool hides = window_ > 0 && window_ < std::max(batch.whole_len, batch.seq_len);
    CHECK(!hides || batch.window_starts, "a batch without the first keys of its windows");
    const Var normed = rmsnorm(tape, x, input_norm, eps_);
    const QKV heads = latent ? (*latent)(tape, normed, batch.positions, tensor_parallel)
                             : split_rope(tape, qkv(tape, tensor_parallel.f(tape, normed, qkv)), batch.positions, rope_,
                                          k_proj.local.rows, head_norms_);
    const AttentionMask mask{hides ? batch.window_starts : batch.document_starts, window_,
                             sinks.name.empty() ? nullptr : &sinks};
    Var mixed =
        attention ? attention(tape, heads, batch, mask) : one_device_attention(tape, heads, batch, mask, head_dim_);
    if (latent) mixed = latent->values(tape, mixed);
    return tensor_parallel.g(tape, o(tape, mixed), o);  // (R_l, E)
}

Var Block::body(Tape& tape, const Var& x, const Batch& batch, const TensorParallelOps& tensor_parallel,
                const std::shared_ptr<void>& choice) {
    const bool recompute_attention = recompute_ == Recompute::selective;
    const bool recompute_pointwise = recompute_attention || recompute_ == Recompute::pointwise;
    const bool outer_attention = std::exchange(tape.recompute_attention, recompute_attention);
    const bool outer_pointwise = std::exchange(tape.recompute_pointwise, recompute_pointwise);
    auto [middle, normed] =
        add_rmsnorm(tape, x, attention_half(tape, x, batch, tensor_parallel), post_attention_norm, eps_);
    Var y = add(tape, middle, (*feed_forward)(tape, normed, batch, tensor_parallel, choice));
    tape.recompute_attention = outer_attention;
    tape.recompute_pointwise = outer_pointwise;
    return y;
}

namespace {
const TensorParallelOps kOneRank;

std::vector<Unit*> units_of(Block& block) {
    std::vector<Unit*> list = {&block.unit};
    if (Unit* inner = block.feed_forward->inner_unit()) list.push_back(inner);
    return list;
}

double mup_ratio(const LlamaConfig& c, const Llama::Options& o) {  // base width / width
    return o.mup_base > 0 ? double(o.mup_base) / double(c.hidden) : 1;
}
}  // namespace

Llama::Llama(const LlamaConfig& c, const Options& o, const Stage& s)
    : config(c), options(o), stage(s), loss_options{o.z_loss, mup_ratio(c, o)}, tensor_parallel(&kOneRank) {
    check_config(c);
    int64_t end = 0;
    for (const Chunk& chunk : s.chunks) {
        CHECK(end <= chunk.first_layer && chunk.first_layer <= chunk.end_layer && chunk.end_layer <= c.layers,
              "layers [{}, {}) of {}", chunk.first_layer, chunk.end_layer, c.layers);
        end = chunk.end_layer;
    }
    if (has_embedding_matrix()) {
        embed_tokens = make_param("model.embed_tokens.weight", {c.vocab, c.hidden}, o.init_std);
        embedding_unit = {"embedding", {&embed_tokens}, {}, nullptr};
    }
    const auto add_block = [&](int64_t layer) -> Block& {
        Block& block = blocks.emplace_back(c, layer, o.init_std);
        block.recompute_ = recompute_in(layer, o.recompute, o.recompute_every);
        if (block.recompute_ == Recompute::full) block.unit.wrappers.push_back(recompute);
        return block;
    };
    for (const Chunk& chunk : s.chunks)
        for (int64_t layer = chunk.first_layer; layer < chunk.end_layer; ++layer) add_block(layer);
    if (s.head && c.multi_token) {
        multi_token = std::make_unique<MultiToken>(c, o.init_std);
        Block& block = add_block(c.layers);
        for (Param* param : multi_token->params()) block.unit.params.push_back(param);
        multi_token->embedding_unit = {"next embedding", {}, {}, &embedding_unit};
        multi_token->head_unit = {"next head", {}, {}, &head_unit};
    }
    if (s.head) {
        final_norm = make_param("model.norm.weight", {c.hidden}, 0);
        if (c.tied) {
            head.weights = {&embed_tokens};
            head_unit = {"head", {&final_norm}, {}, nullptr};
            tied_unit = {"tied head", {}, {}, &embedding_unit};
        } else {
            lm_head = make_param("lm_head.weight", {c.vocab, c.hidden}, o.init_std);
            head.weights = {&lm_head};
            head_unit = {"head", {&final_norm, &lm_head}, {}, nullptr};
        }
    }
    // Yang & Hu et al. 2022, table 8, for Adam. Only the matrices of the blocks are hidden weights, with an input and
    // an output that grow with the width; embedding, head and vectors stay as they are, and the logits are multiplied
    // by the ratio in the loss. Standard deviations are those of --init-std at the base width.
    if (o.mup_base > 0)
        for (Block& block : blocks)
            for (Param* param : block.unit.params) {
                if (!param->is_matrix()) continue;
                param->init_std *= std::sqrt(mup_ratio(c, o));
                param->lr_scale = mup_ratio(c, o);
            }
}

Tensor buffer_tensor(const FeedForward& owner, Device device) {
    const std::vector<float> values = owner.buffer();
    return upload({values.begin(), values.end()}, {int64_t(values.size())}, DType::f32, device, Memory::workspace);
}

std::vector<Unit*> Llama::units() {
    std::vector<Unit*> list;
    if (stage.embedding) list.push_back(&embedding_unit);
    for (Block& block : blocks)
        for (Unit* unit : units_of(block)) list.push_back(unit);
    if (stage.head) list.push_back(&head_unit);
    if (!stage.embedding && has_embedding_matrix()) list.push_back(&embedding_unit);
    return list;
}

std::vector<Unit*> Llama::units_run() {
    std::vector<Unit*> list;
    if (stage.embedding) list.push_back(&embedding_unit);
    for (size_t i = 0; i < stage_blocks(); ++i)
        for (Unit* unit : units_of(blocks[i])) list.push_back(unit);
    if (stage.head) list.push_back(&head_unit);
    if (stage.head && config.tied) list.push_back(&tied_unit);
    if (!multi_token) return list;
    list.push_back(&multi_token->embedding_unit);
    for (Unit* unit : units_of(blocks.back())) list.push_back(unit);
    list.push_back(&multi_token->head_unit);
    return list;
}

Var Llama::hidden(Tape& tape, const Batch& batch, const Var& input, size_t chunk) {
    Var x = input;
    if (stage.embedding && chunk == 0)
        x = embedding_unit.run(
            tape, x, [this, batch](Tape& t, const Var&) { return tensor_parallel->embedding(t, batch, embed_tokens); });
    size_t first = 0;  // of this chunk among all blocks
    for (size_t i = 0; i < chunk; ++i) first += size_t(stage.chunks[i].end_layer - stage.chunks[i].first_layer);
    const auto [first_layer, end_layer] = stage.chunks.at(chunk);
    for (size_t i = first; i < first + size_t(end_layer - first_layer); ++i)
        x = blocks[i].unit.run(
            tape, x,
            [this, &block = blocks[i], batch, choice = blocks[i].feed_forward->new_choice()](Tape& t, const Var& in) {
                return block.body(t, in, batch, *tensor_parallel, choice);
            });
    return x;
}

// finish: of what the head multiplies, (R, E).
Var Llama::run_head(Tape& tape, const Var& x, const std::function<Var(Tape&, const Var& normed)>& finish, Var* normed) {
    const auto norm = [this, normed](Tape& t, const Var& in) {
        const Var y = rmsnorm(t, in, final_norm, config.norm_eps);
        if (normed) *normed = y;
        return y;
    };
    if (config.tied)
        return tied_unit.run(tape, head_unit.run(tape, x, norm), [this, finish](Tape& t, const Var& normed) {
            return finish(t, tensor_parallel->f(t, normed, head));
        });
    return head_unit.run(tape, x, [this, norm, finish](Tape& t, const Var& in) {
        return finish(t, tensor_parallel->f(t, norm(t, in), head));
    });
}

// --loss-chunk: forward and backward of a few rows after another, in the forward pass. So their logits are the only
// ones that exist, and the gradients of x are kept in their place: E numbers per row, not V.
Var Llama::loss_by_chunks(Tape& tape, const Var& x, const Batch& batch, const Unit& unit, const LossOptions& how) {
    const int64_t rows = x.data.rows(), chunk = options.loss_chunk;
    if (tape.recording && unit.open_grads) unit.open_grads();
    Tensor dx = tape.recording ? Tensor::like(x.data) : Tensor();
    Var sum;
    for (int64_t begin = 0; begin < rows; begin += chunk) {
        const int64_t end = std::min(rows, begin + chunk);
        Tape part{.recording = tape.recording};
        Batch its = batch;
        its.targets = batch.targets.element_slice(begin, {end - begin});
        const Var in{.data = x.data.row_slice(begin, end)};
        accumulate(sum.data, tensor_parallel->loss(part, head(part, in), its, *head.weights[0], how).data);
        if (!tape.recording) continue;
        part.backward();
        Tensor to = dx.row_slice(begin, end);
        copy(to, *in.grad);
    }
    tape.record([dx, grad = x.grad] { accumulate(*grad, dx); });
    return sum;
}

// unit: whose parameters are the head's.
Var Llama::loss_of(Tape& tape, const Var& normed, const Batch& batch, const Unit& unit, const LossOptions& how) {
    if (options.loss_chunk > 0 && options.loss_chunk < normed.data.rows() && !on_logits)
        return loss_by_chunks(tape, normed, batch, unit, how);
    const Var scores = head(tape, normed);
    if (on_logits) on_logits(scores.data);
    return tensor_parallel->loss(tape, scores, batch, *head.weights[0], how);
}

Var Llama::forward(Tape& tape, const Batch& batch, const Var& input, size_t chunk) {
    Var x = hidden(tape, batch, input, chunk);
    if (!stage.head || chunk + 1 < stage.chunks.size()) return x;
    Var normed;
    const Unit& unit = config.tied ? tied_unit : head_unit;
    const Var loss = run_head(
        tape, x, [&](Tape& t, const Var& in) { return loss_of(t, in, batch, unit, loss_options); }, &normed);
    if (!multi_token || !batch.next_targets) return loss;
    const Var added = multi_token_loss(tape, normed, batch);
    Var all{.data = Tensor({loss_numbers()}, loss.data.dtype(), loss.data.device())};
    Tensor first = all.data.row_slice(0, loss.data.size()), last = all.data.row_slice(loss.data.size(), loss_numbers());
    copy(first, loss.data);
    copy(last, added.data);
    return all;
}

Var Llama::logits(Tape& tape, const Batch& batch) {
    return run_head(tape, hidden(tape, batch, {}, 0), [this](Tape& t, const Var& normed) { return head(t, normed); });
}

}  // namespace train70b
