#pragma once
// The loss over the held-out data, by forward passes in the layout of the run.
#include "01_single_gpu/complete/trainer.h"

namespace train70b {

// Mean loss over the validation split of each source, in their order; empty where a source has none. Collective.
std::vector<std::optional<double>> evaluate_sources(Trainer& trainer);
double evaluate(Trainer& trainer);  // their mean by weight; if all of these weights are 0, by number of sequences

// Usage error if the run evaluates and no source has a validation split.
void check_evaluation(const TrainOptions& options, const Dataset& data);

void report_evaluation(Trainer& trainer, int64_t step);  // --eval-every: a line and an event

}  // namespace train70b
