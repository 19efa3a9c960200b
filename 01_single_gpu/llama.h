#pragma once
// Llama (Touvron et al. 2023): RMSNorm, RoPE, grouped-query attention, SwiGLU, untied head.
//
//   x = embedding(tokens)                                                                   unit "embedding"
//   x = x + g(o(attention(rope(qkv(f(norm(x)))))));  x = x + g(down(swiglu(gate_up(f(norm(x))))))      units "block 0", ...
//   loss = cross_entropy(head(f(norm(x))), targets)                                         unit "head"
//
// A technique steps in at four places: TensorParallelOps (f, g, the embedding, the loss: chapter 04), the product of a
// linear layer (Linear::multiply: 04, 07), attention (Block::attention: 06) and the wrappers of a unit (01: recomputation,
// 02, 03). The model does not move once built: closures on the tape refer to its parameters.
#include <deque>

#include "01_single_gpu/config.h"
#include "01_single_gpu/layers.h"

namespace train70b {

// A part of the model whose parameters are used, unsharded, resharded and recomputed together.
struct Unit {
    using Body = std::function<Var(Tape&, const Var&)>;
    // Calls the body. What it records before that runs after the unit's backward pass, what it records after it, before.
    using Wrapper = std::function<Var(Tape&, const Var& x, const Body& body)>;

    std::string name;
    std::vector<Param*> params;     // in the order in which they lie in the unit's flat buffer
    std::vector<Wrapper> wrappers;  // a stack, the first one outermost

    Var run(Tape& tape, const Var& x, const Body& body) const { return run_from(0, tape, x, body); }

  private:
    Var run_from(size_t level, Tape& tape, const Var& x, const Body& body) const;
};

// The operators that tensor parallelism (chapter 04) places around a model's products. On one rank: none.
class TensorParallelOps {
  public:
    virtual ~TensorParallelOps() = default;
    // f, before a column-parallel linear layer (qkv, gate_up, head): (R_l, E) -> (R, E); g, after a row-parallel one (o,
    // down): (R, E) -> (R_l, E). R_l < R under sequence parallelism.
    virtual Var f(Tape&, const Var& x, const Linear&) const { return x; }
    virtual Var g(Tape&, const Var& y, const Linear&) const { return y; }
    virtual Var embedding(Tape& tape, const Batch& batch, Param& table) const;                        // (R_l, E)
    virtual Var loss(Tape& tape, const Var& logits, const Batch& batch, const Param& lm_head) const;  // (1)
};

struct Block {
    Param input_norm, q_proj, k_proj, v_proj, o_proj, post_attention_norm, gate_proj, up_proj, down_proj;
    Linear qkv, o, gate_up, down;
    Unit unit;
    std::function<Var(Tape&, const QKV&, const Batch&)> attention;  // empty: one device's

    Block(const LlamaConfig& config, int64_t layer, double init_std);
    Block(const Block&) = delete;
    // One transformer block, (R_l, E) -> (R_l, E).
    Var body(Tape& tape, const Var& x, const Batch& batch, const TensorParallelOps& tensor_parallel);

  private:
    Var attention_half(Tape& tape, const Var& x, const Batch& batch, const TensorParallelOps& tensor_parallel);
    Var mlp_half(Tape& tape, const Var& normed, const TensorParallelOps& tensor_parallel);

    Rope rope_;
    double eps_;
    Recompute recompute_ = Recompute::none;
    friend class Llama;
};

// Which part of the model a rank holds: the layers of its pipeline stage (chapter 05).
struct Chunk {
    int64_t first_layer = 0, end_layer = 0;  // blocks [first, end)
};
struct Stage {
    std::vector<Chunk> chunks;  // several under virtual stages, ascending; other ranks' layers lie between them
    bool embedding = true, head = true;  // before the first chunk, after the last one
};

inline Stage whole_model(const LlamaConfig& config) { return {{{0, config.layers}}, true, true}; }

class Llama {
  public:
    struct Options {
        DType dtype = DType::f32, grad_dtype = DType::f32;
        Device device = Device::cpu;
        Recompute recompute = Recompute::none;
        double init_std = 0.02;  // o_proj and down_proj: divided by sqrt(2 * layers)
    };
    Llama(const LlamaConfig& config, const Options& options, const Stage& stage);
    Llama(const LlamaConfig& config, const Options& options) : Llama(config, options, whole_model(config)) {}
    Llama(const Llama&) = delete;

    const LlamaConfig config;
    const Options options;
    const Stage stage;

    Param embed_tokens, final_norm, lm_head;
    Linear head;
    Unit embedding_unit, head_unit;
    std::deque<Block> blocks;
    const TensorParallelOps* tensor_parallel;  // not owned; never null

    std::vector<Unit*> units();    // those that exist, in forward order
    std::vector<Param*> params();  // of all units

    // One flat buffer per unit, as a ParamStore of one rank allocates them: parameters with their initial values, and
    // gradients of 0. materialize does both.
    void allocate_params(uint64_t seed);
    void allocate_grads();
    void materialize(uint64_t seed);
    void zero_grads();

    // One chunk: returns the loss (1) if the head follows it, else the hidden states (R_l, E). x: the output of the layers
    // before it, empty where the embedding is.
    Var forward(Tape& tape, const Batch& batch, const Var& x = {}, size_t chunk = 0);
    Var logits(Tape& tape, const Batch& batch);  // (R, V)

  private:
    Var hidden(Tape& tape, const Batch& batch, const Var& x, size_t chunk);
    Var head_logits(Tape& tape, const Var& x);
};

}  // namespace train70b
