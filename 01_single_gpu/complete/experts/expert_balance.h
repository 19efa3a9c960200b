#pragma once
// The load of the experts of a step, over all ranks, and what follows from it: the selection biases and the fractions
// of the balancing loss for the next step, and figures for the metrics.
#include "01_single_gpu/complete/experts/experts.h"
#include "01_single_gpu/complete/roles.h"
#include "01_single_gpu/complete/step_report.h"

namespace train70b {

// The load of a step's experts, over the sparse layers.
struct ExpertReport : ReportPart {
    double max_over_mean = 0;         // of the worst layer: load of its busiest expert
    double entropy = 0;               // of the load over that of an even one, mean of the layers: 1 is even
    double dropped = 0;               // fraction of the slots, beyond --capacity-factor
    int64_t dead = 0;                 // experts without a token
    double aux_loss = 0, z_loss = 0;  // what they add to the loss

    void add_to(nlohmann::ordered_json& step, DType dtype) const override;
};
const ExpertReport* experts_of(const StepReport& report);  // null: a dense model

// bias_i += rate * sign(mean load - load of i)
inline void update_bias(std::vector<float>& bias, const std::vector<double>& slots, double rate) {
    double sum = 0;
    for (const double load : slots) sum += load;
    for (size_t i = 0; i < bias.size(); ++i) {
        const double missing = sum / double(slots.size()) - slots[i];
        bias[i] += float(missing > 0 ? rate : missing < 0 ? -rate : 0);
    }
}

}  // namespace train70b
