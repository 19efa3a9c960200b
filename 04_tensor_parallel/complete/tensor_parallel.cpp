#include "04_tensor_parallel/complete/tensor_parallel.h"

#include <numeric>

#include "02_data_parallel/runtime/comm_roles.h"
#include "04_tensor_parallel/complete/overlap.h"
#include "04_tensor_parallel/complete/vocabulary.h"

namespace train70b {

// ---- f and g --------------------------------------------------------------------------------------------------------

namespace {
// x for an operation in place: itself if it has no other owner, else a copy.
Tensor unshared(const Tensor& x) {
    if (x.sole_owner()) return x;
    Tensor own = Tensor::like(x, x.kind());
    copy(own, x);
    return own;
}
// The same for a gradient, which is empty afterwards.
Tensor take(Tensor& grad) {
    Tensor own = unshared(grad);
    grad = Tensor();
    return own;
}
}  // namespace

// tag::f-and-g[]
Var copy_to_ranks(Tape& tape, const Var& x, const Comm& ranks) {
    // tag::lab-f-and-g-copy[]
    Var y{.data = x.data, .recomputed = x.recomputed};
    tape.record([ranks, dx = x.grad, dy = y.grad] {
        Tensor sum = take(*dy);
        ranks.all_reduce(sum).wait();
        accumulate(*dx, sum);
    });
    return y;
    // end::lab-f-and-g-copy[]
}

// tag::lab-f-and-g-reduce[]
Var reduce_from_ranks(Tape&, const Var& y, const Comm& ranks) {
    Var z{.data = unshared(y.data), .grad = y.grad};  // backward is a copy: y and z share one gradient
    ranks.all_reduce(z.data).wait();
    return z;
}
// end::lab-f-and-g-reduce[]
// end::f-and-g[]

Tensor gather_rows(const Comm& ranks, const Tensor& shard) {
    Tensor full({shard.rows() * ranks.size(), shard.cols()}, shard.dtype(), shard.device(), Memory::comm);
    ranks.all_gather(full, shard).wait();
    return full;
}

Var gather_sequence(Tape& tape, const Var& x, const Comm& ranks) {
    // tag::lab-f-and-g-gather[]
    Var y{.data = gather_rows(ranks, x.data)};
    // Only this rank's rows are kept; the backward pass gathers again.
    y.recomputed = Lazy<Tensor>([ranks, x = Saved(x)] { return gather_rows(ranks, x.get()); });
    tape.record([ranks, dx = x.grad, dy = y.grad] {
        const Tensor full = take(*dy);
        Tensor sum({full.rows() / ranks.size(), full.cols()}, full.dtype(), full.device());
        ranks.reduce_scatter(sum, full).wait();
        accumulate(*dx, sum);
    });
    return y;
    // end::lab-f-and-g-gather[]
}

Var reduce_scatter_sequence(Tape& tape, const Var& y, const Comm& ranks) {
    // tag::lab-f-and-g-reduce-scatter[]
    Var z{.data = Tensor({y.data.rows() / ranks.size(), y.data.cols()}, y.data.dtype(), y.data.device())};
    ranks.reduce_scatter(z.data, unshared(y.data)).wait();
    tape.record([ranks, dy = y.grad, dz = z.grad] { accumulate(*dy, gather_rows(ranks, *dz)); });
    return z;
    // end::lab-f-and-g-reduce-scatter[]
}

// ---- the model ------------------------------------------------------------------------------------------------------

namespace {

void narrow_rows(Param& param, int64_t shard, int64_t shards) {
    CHECK(param.local.rows % shards == 0, "{}: {} rows over {}", param.name, param.local.rows, shards);
    param.local.rows /= shards;
    param.local.row_begin += shard * param.local.rows;
}

void narrow_cols(Param& param, int64_t shard, int64_t shards) {
    CHECK(param.local.cols % shards == 0, "{}: {} columns over {}", param.name, param.local.cols, shards);
    param.local.cols /= shards;
    param.local.col_begin += shard * param.local.cols;
}

// The same number of rows on every rank; where the vocabulary is not divisible, those of the last ranks are padding.
void narrow_vocabulary(Param& param, int64_t shard, int64_t shards) {
    param.local.rows = (param.global_shape[0] + shards - 1) / shards;
    param.local.row_begin = shard * param.local.rows;
}

void replicate(Param& param, int replica, int replicas) {
    param.replica = replica;
    param.replicas = replicas;
}

}  // namespace

TensorParallel::TensorParallel(Llama& model, const Comm& ranks, const TensorParallelOptions& options)
    : ranks_(ranks), options_(options), init_std_(model.options.init_std) {
    if (ranks.size() == 1) return;
    if (options.overlap && options.sequence_parallel && model.options.loss_chunk > 0)
        usage_error(
            "--loss-chunk {}: not with --tp-overlap on, whose product gathers the rows of other ranks (try off)",
            model.options.loss_chunk);
    all_grads_ = group_of(ranks);
    if (options.sequence_parallel) norm_grads_ = all_grads_;
    if (model.has_embedding_matrix()) narrow_vocabulary(model.embed_tokens, ranks.rank(), ranks.size());
    shard_blocks(model);
    if (model.stage.head) shard_head(model);
    model.tensor_parallel = this;
}

void TensorParallel::shard_blocks(Llama& model) const {
    const int rank = ranks_.rank(), N = ranks_.size();
    const int kv_shards = int(std::gcd(model.config.kv_heads, int64_t(N))), copies = N / kv_shards;
    GroupPtr kv_grads;
    if (copies > 1)
        kv_grads = group_of(ranks_.split([=](int r) { return r / copies; }, ranks_.name() + "_kv", GroupLoad::light));
    const auto shard_kv = [&](Param& param) {
        narrow_rows(param, rank / copies, kv_shards);
        replicate(param, rank % copies, copies);
        param.partial_grad_group = kv_grads;
    };
    for (Block& block : model.blocks) {
        replicate_norm(block.input_norm);
        if (block.latent) {
            for (Param* param : block.latent->undivided()) replicate_norm(*param);
            for (Param* param : {&block.latent->q_proj, &block.latent->kv_b_proj}) narrow_rows(*param, rank, N);
            for (Linear* linear : {&block.latent->q_up, &block.latent->kv_up}) use_column_parallel(*linear);
        } else {
            narrow_rows(block.q_proj, rank, N);
            for (Param* param : {&block.k_proj, &block.v_proj}) shard_kv(*param);
            use_column_parallel(block.qkv);
        }
        if (model.config.qkv_bias) {
            narrow_rows(block.q_bias, rank, N);
            for (Param* param : {&block.k_bias, &block.v_bias}) shard_kv(*param);
        }
        if (model.config.qk_norm)  // of all heads: each rank has the part of its own
            for (Param* param : {&block.q_norm, &block.k_norm}) {
                replicate(*param, rank, N);
                param->partial_grad_group = all_grads_;
            }
        if (model.config.sinks) narrow_rows(block.sinks, rank, N);
        narrow_cols(block.o_proj, rank, N);
        replicate_norm(block.post_attention_norm);
        use_row_parallel(block.o);
        FeedForward& half = *block.feed_forward;
        for (Param* param : half.undivided()) replicate_norm(*param);
        if (!half.has_mlp()) continue;
        narrow_rows(half.gate_proj, rank, N);
        narrow_rows(half.up_proj, rank, N);
        narrow_cols(half.down_proj, rank, N);
        use_column_parallel(half.gate_up);
        use_row_parallel(half.down);
    }
    if (!model.multi_token) return;
    for (Param* param : model.multi_token->params()) replicate_norm(*param);
}

void TensorParallel::shard_head(Llama& model) const {
    replicate_norm(model.final_norm);
    if (!model.config.tied) narrow_vocabulary(model.lm_head, ranks_.rank(), ranks_.size());
    use_column_parallel(model.head);
}

void TensorParallel::replicate_norm(Param& weight) const {
    replicate(weight, ranks_.rank(), ranks_.size());
    weight.partial_grad_group = norm_grads_;
}

// With overlap, f and g are part of the product.
void TensorParallel::use_column_parallel(Linear& linear) const {
    if (options_.sequence_parallel) linear.dx_kind = Memory::comm;
    if (!options_.overlap) return;
    linear.multiply = [ranks = ranks_, sequence = options_.sequence_parallel](Tape& tape, const Var& x, Linear& self) {
        return column_parallel_linear(tape, x, self, ranks, sequence);
    };
}

void TensorParallel::use_row_parallel(Linear& linear) const {  // without sequence parallelism, g cannot be overlapped
    if (options_.sequence_parallel) linear.y_kind = Memory::comm;
    if (!options_.overlap || !options_.sequence_parallel) return;
    linear.multiply = [ranks = ranks_](Tape& tape, const Var& x, Linear& self) {
        return row_parallel_linear(tape, x, self, ranks);
    };
}

Var TensorParallel::f(Tape& tape, const Var& x, const Linear&) const {
    if (options_.overlap) return x;  // column_parallel_linear does it
    return options_.sequence_parallel ? gather_sequence(tape, x, ranks_) : copy_to_ranks(tape, x, ranks_);
}

Var TensorParallel::g(Tape& tape, const Var& y, const Linear&) const {
    if (options_.overlap && options_.sequence_parallel) return y;  // row_parallel_linear does it
    return finish_half_block(tape, y);
}

Var TensorParallel::finish_half_block(Tape& tape, const Var& y) const {
    return options_.sequence_parallel ? reduce_scatter_sequence(tape, y, ranks_) : reduce_from_ranks(tape, y, ranks_);
}

Var TensorParallel::embedding(Tape& tape, const Batch& batch, Param& table) const {
    Var y = train70b::embedding(tape, batch, table);
    // Simulated peers hold the same rows of the table as this rank, so the others would stay zero: random rows instead.
    if (!ranks_.has_peers())
        fill_normal(y.data, 1, {.cols = y.data.size(), .global_cols = y.data.size()}, float(init_std_ / ranks_.size()));
    return finish_half_block(tape, y);
}

Var TensorParallel::loss(Tape& tape, const Var& logits, const Batch& batch, const Param& head,
                         const LossOptions& options) const {
    return vocabulary_parallel_loss(tape, logits, batch, ranks_, head.local.row_begin, head.global_shape[0], options);
}

}  // namespace train70b
