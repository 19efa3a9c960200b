#pragma once
// DiLoCo (Douillard et al. 2023, algorithm 1): data parallelism over slow links. Gradients are not reduced. Each of N
// ranks takes H steps of its own optimizer on its part of the batches, from the same weights w to its own w_r; then an
// outer step, Nesterov momentum on the outer gradient d, whose all-reduce is all that is sent:
//
//   d = 1/N sum_r (w - w_r)        m = mu m + d        w = w - lr (d + mu m)        w_r = w on every rank
//
// Streaming (Douillard et al. 2025, section 2.2): fragment p of P, the units i with i % P = p, does so at the steps
// with (step + p H/P) % H = 0, so that a step sends 1/P of the weights at most. After the run's last step all fragments
// do, so that one model is evaluated and saved.
//
// With lr 1 and mu 0, w becomes the mean of the w_r. H = 1 is then plain data parallelism if the update is linear in
// the gradient (SGD, no clipping), and any H is one rank's run if the ranks have equal samples. AdamW on different
// samples is neither: each rank divides by the moments of its own gradients.
#include "02_data_parallel/runtime/comm_roles.h"

namespace train70b {

struct OuterOptions {
    int64_t every = 0, fragments = 1;  // H, 0: plain data parallelism; P
    double lr = 0.7, momentum = 0.9;
};

// Also a step state of the trainer, for the outer step after the update. Moments of the inner optimizer, gradient norm
// and clipping are the rank's own.
class OuterSteps : public LocalStore, public StepState {
  public:
    OuterSteps(Llama& model, const Comm& ranks, const OuterOptions& options, int64_t last_step,
               MakeOptimizer make_optimizer)
        : LocalStore(model, std::move(make_optimizer)), ranks_(ranks), options_(options), last_step_(last_step) {}

    void weights_changed() override;   // begins anew from these weights, without momentum
    void finish_gradients() override;  // of the mean over this rank's part of the batch
    void end_step(const Groups&, StepReport& report, bool updated) override;

  private:
    struct Fragment {
        std::vector<Tensor> weights;  // in the optimizer's precision
        Tensor outer, velocity;       // flat: w, and mu m
    };
    void outer_step(Fragment& fragment);

    const Comm ranks_;
    const OuterOptions options_;
    const int64_t last_step_;
    std::vector<Fragment> fragments_;
};

}  // namespace train70b
