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
void add_tensor_parallel_flags(Flags& flags, int64_t& tp, TensorParallelOptions& options);
// Usage error, naming the flag, unless heads, ffn and (with sequence parallelism) the sequence divide by tp.
void check_tensor_parallel(const LlamaConfig& config, int64_t seq_len, int64_t tp,
                           const TensorParallelOptions& options);

// ---- f and g --------------------------------------------------------------------------------------------------------
Var copy_to_ranks(Tape& tape, const Var& x, const Comm& ranks);      // f: (R, E) -> (R, E)
Var reduce_from_ranks(Tape& tape, const Var& y, const Comm& ranks);  // g: (R, E) -> (R, E)
Var gather_sequence(Tape& tape, const Var& x, const Comm& ranks);    // f: (R/N, E) -> (R, E)
Var scatter_sequence(Tape& tape, const Var& y, const Comm& ranks);   // g: (R, E) -> (R/N, E)
// All ranks' rows, (R/N, E) -> (R, E), booked as comm.
Tensor gather_rows(const Comm& ranks, const Tensor& part);

// ---- the model ------------------------------------------------------------------------------------------------------
// What is left to do once the model's slots are filled. A handle; the model outlives it.
class TensorParallel {
  public:
    // Fills the trainer's slots on top of those that data parallelism has filled: attach that first.
    void attach(Trainer& trainer) const;

    // After the last backward pass of a step, and after data parallelism's sum: the gradients of parameters of which
    // several ranks hold a copy, and each has seen only a part of what depends on it:
    //   norm weights, under sequence parallelism      each rank has seen its rows
    //   k_proj, v_proj where tp > kv-heads            each rank has seen its query heads
    // parts: where this rank has a parameter's gradient (Trainer::gradient_parts).
    void sum_replicated_gradients(const std::function<std::vector<Tensor>(const Param&)>& parts) const;

  private:
    struct Replicated {
        Comm ranks;
        std::vector<Param*> params;
    };
    Llama* model_ = nullptr;
    Comm ranks_;
    std::vector<Replicated> replicated_;
    friend TensorParallel apply_tensor_parallel(Llama&, const Comm&, const TensorParallelOptions&);
};

// Before the model is materialised. Narrows q, k, v, gate, up (columns of the products: rows of the weights) and o,
// down (the other way), the embedding's and the head's vocabulary, and fills the model's slots.
TensorParallel apply_tensor_parallel(Llama& model, const Comm& ranks, const TensorParallelOptions& options = {});

}  // namespace train70b
