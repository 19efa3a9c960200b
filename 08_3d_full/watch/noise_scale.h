#pragma once
// --noise-scale: the batch size up to which more sequences per step pay (McCandlish et al. 2018, appendix A.1).
//
// The gradient of B sequences is the true gradient G plus noise that B averages: E|G_B|^2 = |G|^2 + tr(Sigma) / B, with
// Sigma the covariance of one sequence's gradient. The squared norms at two batch sizes are two equations:
//
//     |G|^2     = (B_big |G_big|^2 - B_small |G_small|^2) / (B_big - B_small)
//     tr(Sigma) = (|G_small|^2 - |G_big|^2) / (1 / B_small - 1 / B_big)          B_simple = tr(Sigma) / |G|^2
//
// big: the global batch. small: a rank's first micro-batch, whose gradient alone is in the buffers when a unit's first
// backward pass has ended, before anything is added to it or reduced; |G_small|^2 is averaged over the data-parallel
// ranks. That costs two passes over the gradients and a sum of two numbers per step.
// One step's |G|^2 is noisy and may be negative, so both are averaged over steps before they are divided.
#include "01_single_gpu/complete/trainer.h"

namespace train70b {

// The moving averages of the two estimates.
struct NoiseMoments {
    static constexpr double kDecay = 0.95;       // per step: the last 20 or so count
    static constexpr double kEnough = 0.64;      // the sum of the weights after 20 steps: 1 - 0.95^20
    double gradient = 0, noise = 0, weight = 0;  // |G|^2, tr(Sigma), and the sum of the weights

    // Of a step: the squared norms of the mean gradient of b_small and of b_big sequences.
    void add(double small, double big, double b_small, double b_big);
    double scale() const;  // B_simple, sequences; NaN while an average is not positive
};

// Counts matrices only: under sequence parallelism a rank has only its rows' part of a norm weight's gradient. And not
// a tied embedding: the gradients of its two uses may never be in one buffer.
class NoiseScale : public RunControl {
  public:
    // Wraps the units of the model, inside of what a ParamStore wraps around them: construct it before the store.
    explicit NoiseScale(Trainer& trainer);
    NoiseScale(const NoiseScale&) = delete;

    void before_step(int64_t step) override;
    void gradients_ready(int64_t step) override;
    void complete(StepReport& report) override;
    void finish() override;

  private:
    std::string why_not() const;  // empty: this layout has gradients of two batch sizes
    void backward_ended(size_t unit);

    Trainer& trainer_;
    std::vector<std::vector<Param*>> matrices_;  // of each unit
    std::vector<int64_t> first_sum_;             // of each unit in sums_
    std::vector<bool> measured_;                 // whether the unit's first backward pass of the step has ended
    Tensor sums_;                                // of the squares of each matrix' gradient, fp64
    std::vector<double> squares_;                // of this rank: of its first micro-batch's gradient, of the whole one
    bool begun_ = false, measures_ = false;
    NoiseMoments moments_;
};

}  // namespace train70b
