#pragma once
// Llama (Touvron et al. 2023): RMSNorm, RoPE, grouped-query attention, SwiGLU. And its relatives: with biases of q, k
// and v (Qwen2), with norms of the heads of q and k (Qwen3), with one matrix as embedding and head.
//
//   x = embedding(tokens)                                     unit "embedding"
//   x = x + g(o(attention(rope(qkv(f(norm(x)))))))
//   x = x + g(down(swiglu(gate_up(f(norm(x))))))              units "block 0", "block 1", ...
//   loss = cross_entropy(head(f(norm(x))), targets)           unit "head"
//
// With tied embeddings the head's matrix is that of the embedding: unit "head" has the norm, and unit "tied head" runs
// the rest with the parameters of unit "embedding".
//
// A technique can replace TensorParallelOps (f, g, the embedding, the loss: chapter 04), the product of a linear layer
// (Linear::multiply: 04, 07), attention (Block::attention: 06) and the feed-forward half (FeedForward), or wrap units
// (recomputation: 01; 02, 03). A model cannot be moved once constructed: closures on the tape hold references to its
// parameters.
#include <deque>

#include "01_single_gpu/complete/config.h"
#include "01_single_gpu/complete/latent_attention.h"
#include "01_single_gpu/complete/layers.h"
#include "01_single_gpu/complete/multi_token.h"
#include "01_single_gpu/complete/unit.h"

namespace train70b {

// The operators of tensor parallelism (chapter 04). On one rank, f and g are identities.
class TensorParallelOps {
  public:
    virtual ~TensorParallelOps() = default;
    // f, before a column-parallel linear layer (qkv, gate_up, head): (R_l, E) -> (R, E); g, after a row-parallel one
    // (o, down): (R, E) -> (R_l, E). R_l < R under sequence parallelism.
    virtual Var f(Tape&, const Var& x, const Linear&) const { return x; }
    virtual Var g(Tape&, const Var& y, const Linear&) const { return y; }
    virtual Var embedding(Tape& tape, const Batch& batch, Param& table) const {  // (R_l, E)
        return train70b::embedding(tape, batch, table);
    }
    virtual Var loss(Tape& tape, const Var& logits, const Batch& batch, const Param& /*head*/,
                     const LossOptions& options) const {
        return next_token_loss(tape, logits, batch, options);
    }
};

// The feed-forward half of a block: the dense MLP, down(swiglu(gate_up(x))). A class that derives from it may have no
// MLP, or more: parameters, and a buffer, fp32 numbers that belong to the model but are no parameter.
class FeedForward {
  public:
    // prefix: of the names of the parameters. width: F; 0: no MLP.
    FeedForward(const LlamaConfig& config, const std::string& prefix, int64_t width, double init_std, double out_std);
    FeedForward(const FeedForward&) = delete;
    virtual ~FeedForward() = default;

    Param gate_proj, up_proj, down_proj;
    Linear gate_up, down;
    bool has_mlp() const { return !down.weights.empty(); }

    // (R_l, E) -> (R_l, E). choice: of new_choice(), the same in a recomputation of this micro-batch.
    virtual Var operator()(Tape& tape, const Var& x, const Batch&, const TensorParallelOps& tensor_parallel,
                           const std::shared_ptr<void>& /*choice*/) {
        return mlp(tape, x, tensor_parallel);
    }
    virtual std::shared_ptr<void> new_choice() const { return nullptr; }  // what is decided once per micro-batch

    // More parameters in the block's unit, the same on all tensor-parallel ranks; and a unit that runs in the middle of
    // the block's (Unit::inside).
    virtual std::vector<Param*> undivided() { return {}; }
    virtual Unit* inner_unit() { return nullptr; }
    virtual std::string buffer_name() const { return {}; }  // in files; empty: it has none
    virtual std::vector<float> buffer() const { return {}; }
    virtual void set_buffer(std::vector<float>) {}

  protected:
    Var mlp(Tape& tape, const Var& x, const TensorParallelOps& tensor_parallel) {
        const Var h = swiglu(tape, gate_up(tape, tensor_parallel.f(tape, x, gate_up)));  // (R, F_l)
        return tensor_parallel.g(tape, down(tape, h), down);                             // (R_l, E)
    }
};

// Of a layer: dense, or what LlamaConfig says.
std::unique_ptr<FeedForward> make_feed_forward(const LlamaConfig& config, int64_t layer, double init_std,
                                               double out_std);
bool is_buffer(const std::string& name);
DType stored_dtype(const std::string& name, DType dtype);  // in files: of a buffer fp32, else the model's
Tensor buffer_tensor(const FeedForward& owner, Device device);

struct Block {
    Param input_norm, o_proj, post_attention_norm;
    Param q_proj, k_proj, v_proj;  // without LlamaConfig::latent
    Param q_bias, k_bias, v_bias;  // with LlamaConfig::qkv_bias
    Param q_norm, k_norm;          // with LlamaConfig::qk_norm
    Param sinks;                   // with LlamaConfig::sinks
    Linear qkv, o;
    std::unique_ptr<LatentAttention> latent;    // with LlamaConfig::latent: makes q, k and v; else null
    std::unique_ptr<FeedForward> feed_forward;  // never null
    Unit unit;
    // empty: one_device_attention
    std::function<Var(Tape&, const QKV&, const Batch&, const AttentionMask&)> attention;

    Block(const LlamaConfig& config, int64_t layer, double init_std);
    Block(const Block&) = delete;
    // One transformer block, (R_l, E) -> (R_l, E). choice: as that of FeedForward.
    Var body(Tape& tape, const Var& x, const Batch& batch, const TensorParallelOps& tensor_parallel,
             const std::shared_ptr<void>& choice);

  private:
    Var attention_half(Tape& tape, const Var& x, const Batch& batch, const TensorParallelOps& tensor_parallel);

    Rope rope_;
    int64_t head_dim_;
    double eps_;
    int64_t window_;  // 0: none
    std::optional<HeadNorms> head_norms_;
    Recompute recompute_ = Recompute::none;
    friend class Llama;
};

class Llama {
  public:
    struct Options {
        DType dtype = DType::f32, grad_dtype = DType::f32;
        Device device = Device::cpu;
        Recompute recompute = Recompute::none;
        double init_std = 0.02;  // o_proj and down_proj: divided by sqrt(2 * layers)
        double z_loss = 0;       // coefficient of the z-loss
        // muP: the hidden size at which initial values, learning rates and logits are as without it; 0: no muP
        int64_t mup_base = 0;
        int64_t loss_chunk = 0;  // rows of logits that exist at a time, in training; 0: all
        int64_t recompute_every = 1;
        double multi_token_weight = 0.3;  // with LlamaConfig::multi_token
    };
    Llama(const LlamaConfig& config, const Options& options, const Stage& stage);
    Llama(const LlamaConfig& config, const Options& options) : Llama(config, options, full_model(config)) {}
    Llama(const Llama&) = delete;

    const LlamaConfig config;
    const Options options;
    const Stage stage;
    const LossOptions loss_options;

    Param embed_tokens, final_norm, lm_head;
    Linear head;
    Unit embedding_unit, head_unit;
    Unit tied_unit;                                       // tied embeddings, where the head is
    std::unique_ptr<MultiToken> multi_token;              // with LlamaConfig::multi_token, where the head is; else null
    std::deque<Block> blocks;                             // of the stage's layers; then multi_token's
    const TensorParallelOps* tensor_parallel;             // not owned; never null
    std::function<void(const Tensor& logits)> on_logits;  // empty, or called with (R, V_l) before each loss

    std::vector<Unit*> units();      // those that hold parameters, in the order of their first forward pass
    std::vector<Unit*> units_run();  // those that a micro-batch runs, in forward order
    std::vector<Param*> params() {   // of all units
        std::vector<Param*> list;
        for (Unit* unit : units()) list.insert(list.end(), unit->params.begin(), unit->params.end());
        return list;
    }
    // The feed-forward half, of this stage, that the buffer of this name belongs to; null: none.
    const FeedForward* with_buffer(const std::string& name) const {
        for (const Block& block : blocks)
            if (!name.empty() && block.feed_forward->buffer_name() == name) return block.feed_forward.get();
        return nullptr;
    }
    // The head's stage may have the matrix as well.
    bool has_embedding_matrix() const { return stage.embedding || (config.embeds_twice() && stage.head); }
    // Of a training loss: those of loss_options, then what multi-token prediction adds, which evaluations leave out.
    int64_t loss_numbers() const { return loss_options.numbers() + config.multi_token; }
    bool is_matrix_of_one_use(const Param& p) const {
        return p.is_matrix() && !(config.embeds_twice() && &p == &embed_tokens) &&
               !(config.multi_token && &p == &lm_head);
    }

    // Allocate one flat buffer per unit: initialized parameters, and gradients of 0. materialize() does both.
    void allocate_params(uint64_t seed) {
        for (Unit* unit : units()) {
            bind_data(unit->params, Tensor({total_size(unit->params)}, options.dtype, options.device, Memory::params));
            for (Param* param : unit->params) initialize(*param, seed, 0, param->data);
        }
    }
    void allocate_grads() {
        for (Unit* u : units())
            bind_grads(u->params, Tensor({total_size(u->params)}, options.grad_dtype, options.device, Memory::grads));
        zero_grads();
    }
    void materialize(uint64_t seed) {
        allocate_params(seed);
        allocate_grads();
    }
    void zero_grads() {
        for (Param* param : params())
            if (param->grad) fill(param->grad, 0);
    }

    // Runs one chunk. Returns the loss if it ends with the head, else the hidden states (R_l, E). x: the output of
    // the previous layers; empty if the chunk begins with the embedding.
    Var forward(Tape& tape, const Batch& batch, const Var& x = {}, size_t chunk = 0);
    Var logits(Tape& tape, const Batch& batch);  // (R, V), before muP's loss_options.logit_scale

  private:
    Var hidden(Tape& tape, const Batch& batch, const Var& x, size_t chunk);
    size_t stage_blocks() const { return blocks.size() - (multi_token ? 1 : 0); }
    Var run_head(Tape& tape, const Var& x, const std::function<Var(Tape&, const Var& normed)>& finish,
                 Var* normed = nullptr);
    Var loss_of(Tape& tape, const Var& normed, const Batch& batch, const Unit& unit, const LossOptions& how);
    Var loss_by_chunks(Tape& tape, const Var& x, const Batch& batch, const Unit& unit, const LossOptions& how);
    Var multi_token_loss(Tape& tape, const Var& hidden, const Batch& batch);
};

}  // namespace train70b
