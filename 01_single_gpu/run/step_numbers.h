#pragma once
// What a report says of a step beside loss and norm: time, tokens, FLOPs, and what all ranks tell each other.
#include "01_single_gpu/trainer.h"

namespace train70b {

bool is_finite(const StepReport& report);  // loss and gradient norm

// Completes the report of a step whose step_s and peak are there. All ranks meet, after the step's time was taken: the
// slowest is the straggler, and with documents the pairs that attention computes are summed. If a loss or norm is not
// finite on any of them, records an alarm that names the first parameter and its rank, and throws CommonError on all.
// my_loss: this rank's share, before the sum. Collective.
void add_step_numbers(StepReport& report, Trainer& trainer, double my_loss);

}  // namespace train70b
