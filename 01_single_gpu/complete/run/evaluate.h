#pragma once
// The loss over the held-out data, by forward passes in the layout of the run.
#include "01_single_gpu/complete/trainer.h"

namespace train70b {

// Mean loss over the validation split of each source, in their order; empty where a source has none. Collective.
std::vector<std::optional<double>> evaluate_sources(Trainer& trainer);
double evaluate(Trainer& trainer);  // their mean by weight; if all of these weights are 0, by number of sequences

// Usage error if the run evaluates and no source has a validation split.
void check_evaluation(const TrainOptions& options, const Dataset& data);

// --eval-every: after so many steps and after the last one, a line and an event.
class Evaluation : public RunControl {
  public:
    explicit Evaluation(Trainer& trainer) : trainer_(trainer) {}
    bool after_step(const StepReport& report) override;

  private:
    Trainer& trainer_;
};

}  // namespace train70b
