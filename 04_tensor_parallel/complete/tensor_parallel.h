#pragma once
// Megatron's tensor parallelism (Shoeybi et al. 2019, section 3) and sequence parallelism (Korthikanti et al. 2022).
//
// Two consecutive products are sharded along the dimension between them: the first is column parallel, the second row
// parallel.
//
//     Z = h(X A^T) B^T = sum over ranks r of  h(X A_r^T) B_r^T            h: attention, head by head, or SwiGLU
//
// So there is no communication between the two, and one sum completes a half block. Around the two products stands a
// pair of conjugate operators, each the gradient of the other:
//
//                     half block:   norm -> f -> column parallel -> h -> row parallel -> g -> residual
//
//                     forward                             backward (of the gradient)
//     f               copy                                all-reduce: each rank has the partial dX of its heads
//     g               all-reduce of the partial Z         copy
//
// With sequence parallelism norms and residuals hold 1/N of the rows, for the same number of bytes:
//
//     f               all-gather      R/N -> R rows       reduce-scatter
//     g               reduce-scatter  R -> R/N rows       all-gather
//     and f's all-gather once more for the weight gradient: only the rank's own rows are kept
#include "01_single_gpu/complete/trainer.h"
#include "02_data_parallel/comm.h"

namespace train70b {

struct TensorParallelOptions {
    bool sequence_parallel = false;
    bool overlap = false;  // overlap.h
};

// ---- f and g --------------------------------------------------------------------------------------------------------
Var copy_to_ranks(Tape& tape, const Var& x, const Comm& ranks);            // f: (R, E) -> (R, E)
Var reduce_from_ranks(Tape& tape, const Var& y, const Comm& ranks);        // g: (R, E) -> (R, E)
Var gather_sequence(Tape& tape, const Var& x, const Comm& ranks);          // f: (R/N, E) -> (R, E)
Var reduce_scatter_sequence(Tape& tape, const Var& y, const Comm& ranks);  // g: (R, E) -> (R/N, E)
// All ranks' rows, (R/N, E) -> (R, E), booked as comm.
Tensor gather_rows(const Comm& ranks, const Tensor& shard);

// ---- the model ------------------------------------------------------------------------------------------------------

// Shards a model over the tensor-parallel ranks: q, k, v, gate, up are column parallel (rows of the weights, elements
// of the biases and sinks), o and down row parallel, embedding and head are sharded by the vocabulary. Where several
// ranks hold a replica of a parameter and each computes only a partial gradient, it gets a partial_grad_group:
//   norm weights, under sequence parallelism      each rank has the gradient of its rows; so FeedForward::undivided
//   k_proj, v_proj where tp > kv-heads            each rank has the gradient of its query heads; so their biases
//   q_norm, k_norm                                each rank has the gradient of its heads
// Of latent attention q_b and kv_b are column parallel; what makes the latents is the same on all ranks, as a norm is.
class TensorParallel : public TensorParallelOps {
  public:
    // Construct it before the parameters are allocated. The model outlives this, and refers to it: neither may move.
    TensorParallel(Llama& model, const Comm& ranks, const TensorParallelOptions& options = {});
    TensorParallel(const TensorParallel&) = delete;

    Var f(Tape& tape, const Var& x, const Linear&) const override;
    Var g(Tape& tape, const Var& y, const Linear&) const override;
    Var embedding(Tape& tape, const Batch& batch, Param& table) const override;
    Var loss(Tape& tape, const Var& logits, const Batch& batch, const Param& head,
             const LossOptions& options) const override;

  private:
    void shard_blocks(Llama& model) const;
    void shard_head(Llama& model) const;
    void replicate_norm(Param& weight) const;
    void use_column_parallel(Linear& linear) const;
    void use_row_parallel(Linear& linear) const;
    Var finish_half_block(Tape& tape, const Var& y) const;  // g, for row-parallel layers and the embedding

    const Comm ranks_;
    const TensorParallelOptions options_;
    const double init_std_;
    GroupPtr all_grads_;   // sums gradients of which each rank has a part
    GroupPtr norm_grads_;  // the same, of norm weights; null: they are complete on each rank
};

}  // namespace train70b
