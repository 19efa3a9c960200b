#pragma once
// The layers of a Llama as tape operations: each computes its result and records its gradient, forward beside backward.
//
// Axes, in all chapters: B batch, T tokens of a sequence, R = B*T rows, L layers, E hidden, H query heads, K key/value
// heads, D head size, F ffn, V vocabulary, N ranks; _l: this rank's part
#include "01_single_gpu/param.h"
#include "01_single_gpu/tape.h"

namespace train70b {

// One micro-batch as this rank sees it. Positions travel with the tokens: a context-parallel rank holds scattered ones.
struct Batch {
    int64_t sequences = 0, seq_len = 0;  // B, T
    Tensor tokens, targets, positions;   // (B*T) i32
    double loss_scale = 0;               // 1 / target tokens in the GLOBAL batch: the only scaling there is
};

// y = x W^T: x (R, in), W (out, in), y (R, out). Several weights that lie one behind another are one product: q, k, v.
struct Linear {
    std::vector<Param*> weights;
    // What y and the gradient of x are booked as; under sequence parallelism they are partial sums about to be communicated.
    Memory y_kind = Memory::activations, dx_kind = Memory::activations;
    std::function<Var(Tape&, const Var& x, Linear&)> multiply;  // slot; empty: the product in the parameters' dtype

    Var operator()(Tape& tape, const Var& x);
    Tensor weight() const;  // (out, in), a view of all weights
    Tensor grad() const;
};
Var multiply(Tape& tape, const Var& x, Linear& linear);  // the default of the slot

Var embedding(Tape& tape, const Batch& batch, Param& table);  // (R, E); zeros for tokens whose row is elsewhere
Var add(Tape& tape, const Var& a, const Var& b);
Var rmsnorm(Tape& tape, const Var& x, Param& weight, double eps);
struct SumAndNorm {
    Var sum, normed;
};
SumAndNorm add_rmsnorm(Tape& tape, const Var& a, const Var& b, Param& weight, double eps);
Var swiglu(Tape& tape, const Var& gate_up);  // (R, 2F) -> (R, F)

struct QKV {
    Var q, k, v;  // (R, H*D), (R, K*D), (R, K*D)
};
QKV split_rope(Tape& tape, const Var& qkv, const Tensor& positions, const Rope& rope, int64_t kv_width);

// Attention as two plain functions of tensors; one device's is the default, ring attention is another pair
// (chapter 06).
struct OutLse {
    Tensor out, lse;
};
struct QKVGrads {
    Tensor dq, dk, dv;
};
using AttentionForward = std::function<OutLse(const Tensor& q, const Tensor& k, const Tensor& v)>;
using AttentionBackward = std::function<QKVGrads(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                                 const Tensor& out, const Tensor& lse)>;
Var attention(Tape& tape, const QKV& qkv, AttentionForward forward, AttentionBackward backward);
Var one_device_attention(Tape& tape, const QKV& qkv, const Batch& batch, int64_t head_dim);  // causal

// The loss of the batch, (1) stats_dtype, already scaled. Starts its own gradient: backward() needs no seed.
Var next_token_loss(Tape& tape, const Var& logits, const Batch& batch);

}  // namespace train70b
