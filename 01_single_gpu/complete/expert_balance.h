#pragma once
// The load of the experts of a step, over all ranks, and what follows from it: the selection biases and the fractions
// of the balancing loss for the next step, and figures for the metrics.
#include "01_single_gpu/complete/roles.h"
#include "01_single_gpu/complete/step_report.h"

namespace train70b {

// bias_i += rate * sign(mean load - load of i)
inline void update_bias(std::vector<float>& bias, const std::vector<double>& slots, double rate) {
    double sum = 0;
    for (const double load : slots) sum += load;
    for (size_t i = 0; i < bias.size(); ++i) {
        const double missing = sum / double(slots.size()) - slots[i];
        bias[i] += float(missing > 0 ? rate : missing < 0 ? -rate : 0);
    }
}

// Biases and fractions are the same on all ranks of a stage; checkpoints keep them.
class ExpertBalance : public StepState {
  public:
    explicit ExpertBalance(Llama& model);  // which must outlive it
    void begin_step();
    // Sums the loads over the ranks that hold the same experts, and changes biases and fractions. Collective.
    ExpertReport end_step(const Groups& groups);

    void next_step() override {}
    Rows rows() const override;
    void restore(const Rows& rows) override;

  private:
    Llama& model_;
    std::vector<Experts*> layers_;  // of this stage
    Tensor losses_;                 // (layers, 2): those of each
};

}  // namespace train70b
