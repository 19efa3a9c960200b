#pragma once
// Where a step became infinite or not a number: which parameter, on which rank.
#include <nlohmann/json_fwd.hpp>

#include "01_single_gpu/complete/roles.h"
#include "01_single_gpu/complete/train_options.h"

namespace train70b {

struct NonFinite {
    double loss = 0, grad_norm = 0;  // on that rank
    std::string parameter;           // empty: none, the loss alone is not finite
    bool weight = false;             // the weight itself, not its gradient
    int64_t rank = -1;
    int64_t ranks = 0, of = 1;  // how many ranks have one, of how many

    // "loss 2.5, gradient norm nan; first non-finite parameter: lm_head.weight (its gradient) on rank 3 (1 of 8 ranks
    // has one)"
    std::string text() const;
    nlohmann::ordered_json alarm(int64_t step) const;  // for the metrics file
    std::string advice(int64_t step, const TrainOptions& options) const;
};

// Collective; the same on all ranks. Call it when a rank's loss or norm is not finite; report: of this rank, my_loss:
// its share of the loss. What goes wrong in one place goes wrong in all that is computed after it, so the cause is
// taken to be a weight before a gradient, a gradient on a rank whose own loss is not finite before others, the earliest
// in its pass (weights forward, gradients backward), the lowest rank. Gradients have been summed over the data-parallel
// ranks by then: a NaN that was in one of them before is in all of them.
NonFinite find_non_finite(Llama& model, ParamStore& store, const Groups& peers, const StepReport& report,
                          double my_loss);

}  // namespace train70b
