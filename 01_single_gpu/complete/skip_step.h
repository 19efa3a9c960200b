#pragma once
// Skips updates on a spike (OLMo 2, Groeneveld et al. 2024; SkipStepOptimizer of OLMo-core): a step makes no update if
//   loss or gradient norm > mean + 6 standard deviations
// of the last 128 steps that made one, once there are 64 of them. All ranks have the same numbers and decide alike.
#include <deque>

#include "01_single_gpu/complete/roles.h"

namespace train70b {

class SkipStep : public StepState {
  public:
    static constexpr size_t kWindow = 128, kFirst = kWindow / 2;  // steps
    static constexpr double kSigmas = 6;

    bool skips(const StepReport& report) const;
    // CommonError after kWindow skipped steps in a row: what is usual has changed.
    void end_step(const Groups&, StepReport& report, bool updated) override;
    Rows rows() const override;
    void restore(const Rows& rows) override {
        const auto losses = rows.values.begin(), norms = losses + rows.width;
        const auto size = int64_t(*losses);
        losses_.assign(losses + 1, losses + 1 + size);
        norms_.assign(norms + 1, norms + 1 + size);
        in_a_row_ = size_t(*norms);
    }

  private:
    std::deque<float> losses_, norms_;  // as a checkpoint keeps them
    size_t in_a_row_ = 0;
};

}  // namespace train70b
