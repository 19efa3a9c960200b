#pragma once
// Expert parallelism (GShard: Lepikhin et al. 2020; folded as in Megatron-Core: Liu et al. 2025): the experts of a
// layer are divided over N ranks, and each row goes to the ranks of its experts and back.
//
//                     rows of this rank, sorted by expert: those of a rank's experts are adjacent
//     dispatch        all-to-all with unequal counts   (S, E) -> (S', E)    by source rank, then sorted by expert again
//                     the experts of this rank         (S', E) -> (S', E)
//     combine         all-to-all back                  (S', E) -> (S, E)
//
// Each is the other's gradient. How many rows go where is known only when they are routed, so numbers are exchanged
// before rows: the host waits once for each layer of experts and micro-batch. The MLP of the shared experts is computed
// while rows are dispatched, and its gradient while theirs return.
//
// The ranks of ep are consecutive among tp x cp x dp of a stage: dense layers are divided by tp, tokens by all three,
// experts by ep. Ranks with the same experts, edp = tp cp dp / ep, sum the gradients of those and shard them (ZeRO);
// the router has a partial gradient on each rank of tp, like a norm under sequence parallelism.
#include "01_single_gpu/complete/experts/experts.h"
#include "02_data_parallel/comm.h"
#include "06_context_parallel/complete/context_layout.h"

namespace train70b {

struct ExpertComms {
    Comm tp, cp;  // that share the tokens of a sequence
    Comm ep;
};

// Bytes that a rank sends for one layer of experts and micro-batch of `rows` rows on it, forward and backward, if all
// experts have the same load: k rows E (ep-1)/ep in each of dispatch, combine and their gradients; with full
// recomputation the first two once more.
int64_t expert_traffic(const LlamaConfig& config, int64_t ep, int64_t rows, DType dtype, Recompute recompute);

class ExpertParallel : public ExpertRanks {
  public:
    // Divides the experts. Construct it after TensorParallel and before the parameters are allocated; the model
    // outlives this and refers to it. A model without experts stays as it is. tp above 1 needs sequence parallelism:
    // every rank has other rows.
    ExpertParallel(Llama& model, const ExpertComms& ranks, const ContextLayout& context);
    ExpertParallel(const ExpertParallel&) = delete;

    int parts() const override { return ranks_.cp.size() * ranks_.tp.size(); }
    int part() const override { return ranks_.cp.rank() * ranks_.tp.size() + ranks_.tp.rank(); }
    std::vector<RowPiece> pieces(const Batch& batch, int part) const override;
    std::vector<double> gather(const std::vector<double>& local) const override {
        return ranks_.cp.gather(ranks_.tp.gather(local));
    }
    void plan(Routing& routing, const Tensor& logits) const override;
    Var dispatch(Tape& tape, const Var& sorted, const Routing& routing,
                 const std::function<void()>& meanwhile) const override;
    Var combine(Tape& tape, const Var& out, const Routing& routing) const override;

  private:
    const ExpertComms ranks_;
    const ContextLayout context_;
};

}  // namespace train70b
