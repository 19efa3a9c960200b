#pragma once
// A mixture of experts in place of the MLP (Shazeer et al. 2017; Mixtral: Jiang et al. 2024; DeepSeek-V3, 2024):
//
//   y = sum over the k chosen experts i of  w_i(x) down_i(swiglu(gate_up_i(x)))  [+ the shared experts' MLP of x]
//
//   logits = x W_r^T, in fp32        router       (R, E) -> (R, N)
//   chosen, weights                  choose       (R, k)
//   rows sorted by their expert      dispatch     (R, E) -> (S, E)     S = R k, less what exceeds a capacity
//   expert by expert                 experts      (S, E) -> (S, E)     unit "experts i"
//   y_r = sum of w_rj z_rj           combine      (S, E) -> (R, E)
//
// The choice is discrete, and everything after it is the same in all layouts: a token's experts depend on its own row
// only; a capacity, and the balancing loss, on its sequence, however that is divided over ranks and micro-batches.
//
// Where the experts are is the role of ExpertRanks: all here, or on other ranks (08_3d_full/experts).
#include "01_single_gpu/complete/llama.h"

namespace train70b {

// Where a micro-batch's tokens go.
struct Routing {
    Tensor chosen;                   // (R, k) i32
    Tensor order, place;             // (S) and (R, k) i32: place_slots
    Tensor piece_grads;              // (P, N): gradient of the balancing loss; empty: none
    std::vector<int64_t> sent;       // rows for each of the N experts
    std::vector<int64_t> rows;       // rows of each of this rank's experts
    std::shared_ptr<void> exchange;  // of ExpertRanks

    explicit operator bool() const { return bool(chosen); }
};

// The ranks that share the tokens of a sequence, or the experts. This class: one rank.
class ExpertRanks {
  public:
    virtual ~ExpertRanks() = default;
    // Of the ranks that hold tokens of the same sequences.
    virtual int parts() const { return 1; }
    virtual int part() const { return 0; }  // this one
    virtual std::vector<RowPiece> pieces(const Batch& batch, int /*part*/) const {
        std::vector<RowPiece> list;
        for (int64_t s = 0; s < batch.sequences; ++s) list.push_back({s, 0});
        return list;
    }
    // In the order of parts.
    virtual std::vector<double> gather(const std::vector<double>& local) const { return local; }

    // Fills routing.rows from routing.sent.
    virtual void plan(Routing& routing, const Tensor&) const { routing.rows = routing.sent; }
    // Rows sorted by expert to the ranks that have them, sorted by expert again; and back. Calls `meanwhile`, which
    // needs none of them, while they are on their way.
    virtual Var dispatch(Tape&, const Var& sorted, const Routing&, const std::function<void()>& meanwhile) const {
        meanwhile();
        return sorted;
    }
    virtual Var combine(Tape&, const Var& out, const Routing&) const { return out; }
};

// Of a step, on this rank.
struct ExpertLoads {
    std::vector<double> slots, dropped;  // (N): that chose each expert; of these, beyond its capacity
};

// The MLP is that of the shared experts; the buffer is the selection bias of a sigmoid router.
class Experts : public FeedForward {
  public:
    Experts(const LlamaConfig& config, int64_t layer, double init_std, double out_std);

    Param router;                       // (N, E)
    Param expert_gate_up, expert_down;  // (N 2 F, E), (N E, F): expert by expert; of some of them if ranks divide them
    Unit unit;                          // of these two, which other ranks may share than the block's
    const ExpertRanks* ranks;           // not owned; never null

    // choice: a Routing, empty or of an earlier run of the same micro-batch.
    Var operator()(Tape& tape, const Var& x, const Batch& batch, const TensorParallelOps& tensor_parallel,
                   const std::shared_ptr<void>& choice) override;
    std::shared_ptr<void> new_choice() const override { return std::make_shared<Routing>(); }
    std::vector<Param*> undivided() override { return {&router}; }
    Unit* inner_unit() override { return &unit; }
    std::string buffer_name() const override;
    std::vector<float> buffer() const override { return config_.sigmoid ? bias_ : std::vector<float>(); }
    void set_buffer(std::vector<float> values) override { set_bias(std::move(values)); }

    // What decides on the choice besides the weights, as host numbers (N): fp32, so that checkpoints keep it exactly.
    const std::vector<float>& bias() const { return bias_; }            // of a sigmoid, or with a rate; empty: 0
    const std::vector<float>& fractions() const { return fractions_; }  // of_batch: f_i of the step before
    void set_bias(std::vector<float> bias) {
        bias_ = std::move(bias);
        device_bias_ = Tensor();
    }
    void set_fractions(std::vector<float> fractions) { fractions_ = std::move(fractions); }

    std::function<void(const Tensor& logits)> on_logits;  // empty, or called with (R_l, N) before each choice

    // Training batches add to them (expert_balance.h); losses (2) fp64: balancing loss and z-loss, this rank's
    // share.
    ExpertLoads loads;
    Tensor losses;

  private:
    // Without the shared experts. meanwhile: is called once, between two steps that may communicate.
    Var routed(Tape& tape, const Var& x, const Batch& batch, Routing& routing, const std::function<void()>& meanwhile);
    Var logits(Tape& tape, const Var& x);
    double z_loss_of(const Batch& batch) const {  // the coefficient of the z-loss of one row; 0 in an evaluation
        return batch.sequence_scale > 0 ? config_.balance.z_loss * batch.sequence_scale / double(batch.whole_len) : 0;
    }
    void route(Routing& routing, const Tensor& logits, const Batch& batch);
    Tensor piece_grads(const std::vector<double>& counts, const std::vector<RowPiece>& pieces, const Batch& batch,
                       const Tensor& logits) const;
    const Tensor& bias_like(const Tensor& logits);

    const ExpertsConfig config_;
    const RouterShape shape_;
    std::vector<float> bias_, fractions_;
    Tensor device_bias_;
};

Experts* experts_of(const Block& block);  // null: a dense layer

}  // namespace train70b
