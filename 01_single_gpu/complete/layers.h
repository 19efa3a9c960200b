#pragma once
// The layers of a Llama as tape operations: each computes its result and records its gradient.
//
// The axes in all chapters: B batch, T tokens, R = B*T rows, L layers, E hidden, H heads, K key/value heads, D head
// size, F ffn, V vocabulary, N ranks; suffix _l: this rank's part.
#include "01_single_gpu/complete/param.h"
#include "01_single_gpu/complete/tape.h"

namespace train70b {

// One micro-batch on this rank, with the positions of its tokens: context parallelism makes them non-contiguous.
struct Batch {
    int64_t sequences = 0, seq_len = 0;  // B, T
    Tensor tokens, targets, positions;   // (B*T) i32
    double loss_scale = 0;               // 1 / target tokens in the GLOBAL batch; gradients are scaled nowhere else
    // Of attention's queries on this rank, in the order of attention's rows; positions restart at them. Empty: every
    // sequence is one document.
    DocumentStarts document_starts;
    DocumentStarts window_starts;  // in layers with a window: of it and the document; empty: it hides no key
    Tensor order;                  // (B*T) i32, rows_by_token() of the tokens; empty: not needed, as on a CPU
    // Of multi-token prediction: the token behind each, and its target; empty: none, as in evaluations.
    Tensor next_tokens, next_targets, next_order;
    // (query, key) of the whole sequences, all ranks together, in the mean of the layers; 0 without document_starts
    double document_pairs = 0;
    int64_t whole_len = 0;      // tokens of a sequence, all ranks together
    double sequence_scale = 0;  // 1 / sequences in the GLOBAL batch; 0: an evaluation, which is not counted
};

// y = x W^T + b: x (R, in), W (out, in), y (R, out). Adjacent weights in memory (q, k, v) form one product, and their
// biases one vector.
struct Linear {
    std::vector<Param*> weights;
    std::vector<Param*> biases;  // empty: none
    // The memory kinds of y and of the gradient of x: comm if they are partial sums that will be communicated.
    Memory y_kind = Memory::activations, dx_kind = Memory::activations;
    std::function<Var(Tape&, const Var& x, Linear&)> multiply;  // replaceable; empty: ::multiply()

    Var operator()(Tape& tape, const Var& x);
    Tensor weight() const;  // (out, in), a view of all weights
    Tensor grad() const;
    Tensor bias() const;  // (out)
    Tensor bias_grad() const;
};
Var multiply(Tape& tape, const Var& x, Linear& linear);  // in the parameters' dtype

Var embedding(Tape& tape, const Batch& batch, Param& table);  // (R, E); zeros for tokens whose row another rank holds
Var add(Tape& tape, const Var& a, const Var& b);
std::vector<Var> split_columns(Tape& tape, const Var& x, const std::vector<int64_t>& widths);  // (R, sum) -> (R, each)
Var join_columns(Tape& tape, const std::vector<Var>& parts);                                   // the inverse
Var rmsnorm(Tape& tape, const Var& x, Param& weight, double eps);
struct SumAndNorm {
    Var sum, normed;
};
SumAndNorm add_rmsnorm(Tape& tape, const Var& a, const Var& b, Param& weight, double eps);
Var swiglu(Tape& tape, const Var& gate_up);  // (R, 2F) -> (R, F)

struct QKV {
    Var q, k, v;  // (R, H*D), (R, K*D), (R, K*D)
};
// Norms of each head of q and k before RoPE (Qwen3).
struct HeadNorms {
    Param *q, *k;  // (D)
    double eps;
};
// Of these tensors; with pointwise recomputation `again` makes them for the closures.
QKV make_qkv(const Tape& tape, const std::array<Tensor, 3>& made, std::function<std::array<Tensor, 3>()> again);
QKV split_rope(Tape& tape, const Var& qkv, const Tensor& positions, const Rope& rope, int64_t kv_width,
               const std::optional<HeadNorms>& norms = {});

// Attention as two functions of tensors, forward and backward: one device's by default, and one pair per
// context-parallel algorithm (chapter 06).
struct OutLse {
    Tensor out, lse;
};
struct QKVGrads {
    Tensor dq, dk, dv;
};
using AttentionForward = std::function<OutLse(const Tensor& q, const Tensor& k, const Tensor& v)>;
using AttentionBackward = std::function<QKVGrads(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                                 const Tensor& out, const Tensor& lse)>;
// What a layer's attention has of its own: the first key that each query sees, which is in its document and in a window
// of so many tokens (0: none), and sinks (null: none), those of its heads from first_head on.
struct AttentionMask {
    DocumentStarts starts;
    int64_t window = 0;
    Param* sinks = nullptr;
    int64_t first_head = 0;
};
Var attention(Tape& tape, const QKV& qkv, const AttentionMask& mask, AttentionForward forward,
              AttentionBackward backward);
Var one_device_attention(Tape& tape, const QKV& qkv, const Batch& batch, const AttentionMask& mask,
                         int64_t head_dim);  // causal

struct LossOptions {
    double z_loss = 0;       // coefficient of the z-loss; 0: none
    double logit_scale = 1;  // muP: the loss is that of the logits times this
    int64_t numbers() const { return z_loss > 0 ? 2 : 1; }
};
// The scaled loss of the batch, stats_dtype: (1), or with a z-loss (2): the cross-entropy, and what the z-loss adds to
// it. It initializes its own gradient, so backward() needs no seed.
Var next_token_loss(Tape& tape, const Var& logits, const Batch& batch, const LossOptions& options = {});

}  // namespace train70b
