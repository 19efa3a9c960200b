#pragma once
// The load of experts: an alarm once the busiest expert of a layer has had more than --load-alarm times the mean load
// in each of kSteps steps; again only after a step below.
#include "01_single_gpu/complete/flags/options.h"
#include "01_single_gpu/complete/trainer.h"

namespace train70b {

class LoadAlarm : public RunControl {
  public:
    static constexpr int kSteps = 20;
    LoadAlarm(Trainer& trainer, double threshold) : trainer_(trainer), threshold_(threshold) {}  // 0: never
    bool after_step(const StepReport& report) override;

    static void add_flag(Flags& flags, double& threshold);
    static void check(double threshold, const LlamaConfig& model);  // usage error for a load that no expert can have
    // Of a flag that is not given, below 0: 3, or two thirds of the way from an even load, 1, to the largest that there
    // can be, N / k; 0 for a dense model.
    static double threshold(double flag, const LlamaConfig& model);

  private:
    Trainer& trainer_;
    const double threshold_;
    int above_ = 0;  // steps in a row
};

}  // namespace train70b
