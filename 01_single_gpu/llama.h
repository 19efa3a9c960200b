#pragma once
// Llama (Touvron et al. 2023) with slots: RMSNorm, RoPE, grouped-query attention, SwiGLU, untied head.
//
//   x = embedding(tokens)                                                         unit "embedding"
//   x = x + o(attention(rope(qkv(norm(x)))));  x = x + down(swiglu(gate_up(norm(x))))    units "block 0", "block 1",
//   ... loss = cross_entropy(head(norm(x)), targets)                                  unit "head"
//
// A slot is a std::function member that is empty here (the one-rank default runs) and that a later chapter fills. The
// model does not move once built: closures on the tape refer to its parameters.
#include <deque>

#include "01_single_gpu/config.h"
#include "01_single_gpu/layers.h"

namespace train70b {

// A part of the model whose parameters are used, gathered, freed and recomputed together.
struct Unit {
    using Body = std::function<Var(Tape&, const Var&)>;
    using Around =
        std::function<Var(Tape&, const Var& x, const Body& body)>;  // calls the body, and does something around it

    std::string name;
    std::vector<Param*> params;  // in the order in which they lie in the unit's flat buffer
    std::vector<Around> around;  // slot; a stack, the first one outermost

    Var run(Tape& tape, const Var& x, const Body& body) const { return run_from(0, tape, x, body); }

  private:
    Var run_from(size_t level, Tape& tape, const Var& x, const Body& body) const;
};

struct Block {
    Param input_norm, q_proj, k_proj, v_proj, o_proj, post_attention_norm, gate_proj, up_proj, down_proj;
    Linear qkv, o, gate_up, down;
    Unit unit;

    // Slots (chapter 04), once per half block: between the norm and the column product, and after the row product.
    std::function<Var(Tape&, const Var&)> before_attention, after_attention, before_mlp, after_mlp;
    std::function<Var(Tape&, const QKV&, const Batch&)> attention;  // slot (chapter 06)

    Block(const LlamaConfig& config, int64_t layer, double init_std);
    Block(const Block&) = delete;
    Var body(Tape& tape, const Var& x, const Batch& batch);  // one transformer block, (R, E) -> (R, E)

  private:
    Var attention_half(Tape& tape, const Var& x, const Batch& batch);
    Var mlp_half(Tape& tape, const Var& normed);

    Rope rope_;
    double eps_;
    Recompute recompute_ = Recompute::none;
    friend class Llama;
};

// Which part of the model a rank holds; chapter 05 gives each pipeline stage its own.
struct Chunk {
    int64_t first_layer = 0, end_layer = 0;  // blocks [first, end)
};
struct Stage {
    std::vector<Chunk> chunks;           // stretches of layers; more than one: others' lie between them
    bool embedding = true, head = true;  // before the first of them, behind the last
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
    std::function<Var(Tape&, const Batch&, Param& table)> embed;      // slot (chapter 04)
    std::function<Var(Tape&, const Var&)> before_head;                // slot (chapter 04): between norm and product
    std::function<Var(Tape&, const Var& logits, const Batch&)> loss;  // slot (chapter 04)

    std::vector<Unit*> units();    // those that exist, in forward order
    std::vector<Param*> params();  // of all units

    std::function<void()> allocate_grads;  // slot (chapter 02)
    // Slots (chapter 03). Allocates the parameters with their initial values; calls the function while a unit's
    // parameters can be written.
    std::function<void(uint64_t seed)> allocate_params;
    std::function<void(Unit&, const std::function<void()>&)> write_params;

    // Allocates the parameters, with their initial values, and the gradients; one flat buffer of each per unit.
    void materialise(uint64_t seed);
    void zero_grads();

    // One chunk: returns the loss (1) if the head is behind it, else the hidden states (R, E). x: what the layers
    // before it gave, empty where the embedding is.
    Var forward(Tape& tape, const Batch& batch, const Var& x = {}, size_t chunk = 0);
    Var logits(Tape& tape, const Batch& batch);  // (R, V)

  private:
    Var hidden(Tape& tape, const Batch& batch, const Var& x, size_t chunk);
    Var head_logits(Tape& tape, const Var& x);
};

}  // namespace train70b
