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
#include "01_single_gpu/complete/config.h"
#include "01_single_gpu/complete/layers.h"
#include "01_single_gpu/complete/unit.h"

namespace train70b {

// How the load of the experts is kept even. Sums are over the N experts and the sparse layers.
struct Balance {
    // aux_loss * mean over the sequences of  sum_i f_i P_i:  f_i = N / (k T) * (slots of the sequence that chose i),
    // P_i the mean score. of_batch: f_i of the whole batch of the step before (of the first step: 1), the same in all
    // layouts, too.
    double aux_loss = 0.01;
    bool of_batch = false;
    double z_loss = 0;     // * mean over the tokens of log(sum of exp(logits))^2
    double bias_rate = 0;  // after a step, bias_i += bias_rate * sign(mean load - load of i) (DeepSeek-V3)
};

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
    virtual std::vector<RowPiece> pieces(const Batch& batch, int part) const;
    virtual std::vector<double> gather(const std::vector<double>& mine) const { return mine; }  // in the order of parts

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

// Hugging Face's name of the bias that belongs to a router: model.layers.0.mlp.gate.e_score_correction_bias
std::string bias_of_router(const std::string& router_name);
bool is_router_bias(const std::string& name);
DType stored_dtype(const std::string& name, DType dtype);  // fp32 of such a bias, else the model's

class Experts {
  public:
    Experts(const LlamaConfig& config, int64_t layer, double init_std, double out_std, const Balance& balance);
    Experts(const Experts&) = delete;

    Param router;              // (N, E)
    Param gate_up, down;       // (N 2 F, E), (N E, F): expert by expert; of some of them if ranks divide them
    Unit unit;                 // gate_up and down, which other ranks may share than those of the block
    const ExpertRanks* ranks;  // not owned; never null

    // (R_l, E) -> (R_l, E). routing: empty, or of an earlier run of the same micro-batch, which a recomputation
    // repeats. meanwhile: is called once, between two steps that may communicate.
    Var operator()(
        Tape& tape, const Var& x, const Batch& batch, Routing& routing, const std::function<void()>& meanwhile = [] {});

    // What decides on the choice besides the weights, as host numbers (N): fp32, so that checkpoints keep it exactly.
    const std::vector<float>& bias() const { return bias_; }            // of a sigmoid, or with a rate; empty: 0
    const std::vector<float>& fractions() const { return fractions_; }  // of_batch: f_i of the step before
    void set_bias(std::vector<float> bias);
    Tensor bias_tensor(Device device) const;  // (N) fp32; 0 if it is empty
    void set_fractions(std::vector<float> fractions) { fractions_ = std::move(fractions); }

    std::function<void(const Tensor& logits)> on_logits;  // empty, or called with (R_l, N) before each choice

    // Training batches add to them (run/expert_balance.h); losses (2) fp64: balancing loss and z-loss, this rank's
    // share.
    ExpertLoads loads;
    Tensor losses;

  private:
    Var logits(Tape& tape, const Var& x);
    double z_loss_of(const Batch& batch) const;
    void route(Routing& routing, const Tensor& logits, const Batch& batch);
    Tensor piece_grads(const std::vector<double>& counts, const std::vector<RowPiece>& pieces, const Batch& batch,
                       const Tensor& logits) const;
    const Tensor& bias_like(const Tensor& logits);

    const ExpertsConfig config_;
    const RouterShape shape_;
    const Balance balance_;
    std::vector<float> bias_, fractions_;
    Tensor device_bias_;
};

}  // namespace train70b
