#pragma once
// AdamW (Loshchilov & Hutter 2019) with fp32 master weights for bf16 parameters.
#include <functional>

#include "01_single_gpu/complete/param.h"

namespace train70b {

// Consecutive elements of a parameter that this rank updates: all of them here, a shard under ZeRO (chapter 03).
struct Segment {
    const Param* param = nullptr;
    int64_t offset = 0;  // of the first element in the parameter's local rectangle
    Tensor data, grad;   // views of these elements

    bool decays() const { return param->is_matrix(); }   // weight decay: matrices only
    bool counts() const { return param->replica == 0; }  // in norms: exactly one replica does
    GlobalIndex global_index() const { return param->global_index(offset); }
};
std::vector<Segment> full_segments(const std::vector<Param*>& params);

// Called with each state of a segment: first "weight", in the precision in which the optimizer keeps it (the master
// weights if there are some, otherwise the parameter itself), then "exp_avg", "exp_avg_sq", ...
using StateVisitor = std::function<void(const Segment& segment, const char* name, Tensor& state)>;

class Optimizer {
  public:
    virtual ~Optimizer() = default;
    // Called on all optimizers of a rank before the first update() of a step: muon.h.
    virtual void prepare(double /*grad_scale*/) {}
    // Performs the update of a step, numbered from 1 (for the bias correction). Gradients are multiplied by grad_scale,
    // the clipping factor.
    virtual void update(int64_t step, double lr, double grad_scale) = 0;
    // Call after the parameters were changed from outside (loaded, resumed): copies them to the master weights.
    virtual void weights_changed() = 0;
    // Visits every state of every segment in a fixed order, for checkpoints.
    virtual void for_each_state(const StateVisitor& visit) = 0;
    // Call after a visitor has written the states: copies master weights to the parameters.
    virtual void states_changed() = 0;
};
// Creates an optimizer for these segments. Its states are on the segments' device, booked under `states`.
using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(std::vector<Segment>, Memory states)>;
template <class T, class... Settings>
MakeOptimizer maker_of(const Settings&... settings) {
    return [=](std::vector<Segment> segments, Memory states) {
        return std::make_unique<T>(std::move(segments), settings..., states);
    };
}

// The fp32 copy of a parameter that an optimizer updates; empty if the parameter is fp32 or fp64 itself.
Tensor make_master(const Tensor& param, Memory states);
int64_t master_bytes(DType param);  // per element

// State per element: exp_avg and exp_avg_sq (8 bytes; fp64: 16), and a master weight for bf16 parameters (12 bytes in
// all): bf16 has 8 bits of precision and would lose updates smaller than 1/256 of the weight.
class AdamW : public Optimizer {
  public:
    struct Hyper {
        double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
        AdamWStep at(int64_t step, double lr, double grad_scale, const Segment& segment) const;  // step from 1
    };
    // Master weights are initialized from the parameters. States are on the segments' device, booked under `states`.
    AdamW(std::vector<Segment> segments, const Hyper& hyper, Memory states = Memory::optimizer);
    static MakeOptimizer maker(const Hyper& hyper) { return maker_of<AdamW>(hyper); }
    static int64_t state_bytes(DType param);  // per element

    void update(int64_t step, double lr, double grad_scale) override;
    void weights_changed() override;
    void for_each_state(const StateVisitor& visit) override;
    void states_changed() override;

  protected:
    struct State {
        Segment segment;
        Tensor master;                                // empty: the parameter itself is updated
        Tensor exp_avg, exp_avg_sq = {}, scale = {};  // those that the optimizer keeps
        Tensor& weight() { return master ? master : segment.data; }
    };
    // For optimizers with other moments, which fill states_.
    explicit AdamW(const Hyper& hyper) : hyper_(hyper) {}
    virtual void update_segment(State& state, const AdamWStep& step);

    std::vector<State> states_;

  private:
    const Hyper hyper_;
};

}  // namespace train70b
