#pragma once
// AdamW with fp32 master weights for bf16, and the learning-rate schedules.
#include <functional>

#include "01_single_gpu/param.h"

namespace train70b {

// A stretch of a parameter that this rank updates: all of it here, a shard of it under ZeRO (chapter 03).
struct Segment {
    Tensor param, grad;
    bool decay = false;  // weight decay applies to matrices only
    bool counts = true;  // in norms: this rank's is the one replica that does
    GlobalIndex place;   // which elements of the whole parameter these are
    uint64_t key = 0;    // the parameter's, for random numbers
};
std::vector<Segment> whole_segments(const std::vector<Param*>& params);

class Optimizer {
  public:
    virtual ~Optimizer() = default;
    // One update with the gradients times grad_scale (the clipping factor).
    virtual void step(double lr, double grad_scale) = 0;
};
// Makes the optimizer of some segments. Its states lie on their device, booked as told.
using MakeOptimizer = std::function<std::unique_ptr<Optimizer>(std::vector<Segment>, Memory states)>;

// The fp32 copy of a parameter that an optimizer updates; empty where the parameter is fp32 or fp64 itself.
Tensor make_master(const Tensor& param, Memory states);
int64_t master_bytes(DType param);  // per element

// Optimizer states per element: exp_avg and exp_avg_sq (8 bytes; 16 with fp64), and for bf16 parameters a master weight
// (12 bytes): a bf16 weight has 8 bits of precision and would swallow updates smaller than 1/256 of it.
class AdamW : public Optimizer {
  public:
    struct Hyper {
        double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
        AdamWStep at(int64_t step, double lr, double grad_scale, bool decay) const;  // step from 1
    };
    // Master weights start from the parameters. The states lie on the segments' device, booked under `states`.
    AdamW(std::vector<Segment> segments, const Hyper& hyper, Memory states = Memory::optimizer);
    static MakeOptimizer maker(const Hyper& hyper);
    static int64_t state_bytes(DType param);  // per element

    void step(double lr, double grad_scale) override;

  private:
    struct State {
        Segment segment;
        Tensor master, exp_avg, exp_avg_sq;
    };
    std::vector<State> states_;
    Hyper hyper_;
    int64_t step_ = 0;
};

enum class LrShape { constant, linear, cosine, wsd };
LrShape lr_shape_of(const std::string& name);

// Step s of a warm-up of W has s/W of the peak. After it: constant; linear or cosine down to min_lr at the last step;
// wsd (warm-up, stable, decay): at the peak, then linear over the last fifth of all steps, as in Haegele et al. 2024
// (MiniCPM, Hu et al. 2024, where the name comes from, decays exponentially over about the last tenth).
struct LrSchedule {
    LrShape shape = LrShape::cosine;
    double peak = 0, min = 0;
    int64_t warmup = 0, steps = 0;
    double at(int64_t step) const;  // step from 1
};

}  // namespace train70b
