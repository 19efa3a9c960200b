#pragma once
// Megatron's tensor parallelism (Shoeybi et al. 2019, section 3) and sequence parallelism (Korthikanti et al. 2022).
//
// Two products in a row are divided along the dimension between them, the first by its columns, the second by its rows:
//
//     Z = h(X A^T) B^T = sum over ranks r of  h(X A_r^T) B_r^T            h: attention, head by head, or SwiGLU
//
// so between them no rank needs anything of another's, and one sum finishes a half block. What surrounds the two
// products is a pair of conjugate operators, each the other's gradient:
//
//                     half block:   norm -> f -> column product -> h -> row product -> g -> residual
//
//                     forward                             backward (of the gradient)
//     f               copy                                all-reduce: each rank has its heads' share of dX
//     g               all-reduce of the shares of Z       copy
//
// With sequence parallelism norms and residuals hold 1/N of the rows, and the same bytes buy that too:
//
//     f               all-gather      R/N -> R rows       reduce-scatter
//     g               reduce-scatter  R -> R/N rows       all-gather
//     and once more f's all-gather for the weight gradient: only the rank's own rows are kept
//
// B batch, T tokens, R = B*T rows, E hidden, F ffn, V vocabulary, N = tp ranks;  _l: this rank's part
#include "01_single_gpu/trainer.h"
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
Tensor gather_rows(const Comm& ranks, const Tensor& part);

// ---- the model ------------------------------------------------------------------------------------------------------

// Divides a model over the tensor-parallel ranks: q, k, v, gate, up by the columns of their products (rows of the weights),
// o and down the other way, embedding and head by the vocabulary. Parameters of which several ranks hold a replica and each
// sees only a part of what depends on it get a partial_grad_group:
//   norm weights, under sequence parallelism      each rank has seen its rows
//   k_proj, v_proj where tp > kv-heads            each rank has seen its query heads
class TensorParallel : public TensorParallelOps {
  public:
    // Before the parameters are allocated. The model outlives this, and refers to it: neither moves.
    TensorParallel(Llama& model, const Comm& ranks, const TensorParallelOptions& options = {});
    TensorParallel(const TensorParallel&) = delete;

    Var f(Tape& tape, const Var& x, const Linear&) const override;
    Var g(Tape& tape, const Var& y, const Linear&) const override;
    Var embedding(Tape& tape, const Batch& batch, Param& table) const override;
    Var loss(Tape& tape, const Var& logits, const Batch& batch, const Param& lm_head) const override;

  private:
    void divide_embedding(Llama& model) const;
    void divide_blocks(Llama& model) const;
    void divide_head(Llama& model) const;
    void replicate_norm(Param& weight) const;
    void use_column_parallel(Linear& linear) const;
    void use_row_parallel(Linear& linear) const;
    Var finish_half_block(Tape& tape, const Var& y) const;  // g, wherever it is done

    const Comm ranks_;
    const TensorParallelOptions options_;
    const double init_std_;
    GroupPtr norm_grads_;  // sums the gradients of norm weights; null: each rank's are complete
};

}  // namespace train70b
