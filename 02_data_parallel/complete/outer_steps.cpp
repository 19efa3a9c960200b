#include "02_data_parallel/complete/outer_steps.h"

namespace train70b {

void OuterSteps::weights_changed() {
    LocalStore::weights_changed();
    fragments_.assign(size_t(options_.fragments), {});
    std::map<const Param*, size_t> fragment_of;
    const std::vector<Unit*> units = model_.units();
    for (size_t i = 0; i < units.size(); ++i)
        for (const Param* param : units[i]->params) fragment_of[param] = i % fragments_.size();
    for_each_state([&](const Segment& segment, const std::string& name, Tensor& state) {
        if (name == "weight") fragments_[fragment_of.at(segment.param)].weights.push_back(state);
    });
    for (Fragment& f : fragments_) {
        f.outer = Tensor({total_size(f.weights)}, f.weights[0].dtype(), f.weights[0].device(), Memory::optimizer);
        copy_to_flat(f.outer, f.weights);
        fill(f.velocity = Tensor::like(f.outer, Memory::optimizer), 0);
    }
}

// The loss is scaled by the targets of the global batch, of which ranks have equal numbers, so the gradient of this
// rank's mean is N times what it summed.
void OuterSteps::finish_gradients() {
    for (Param* param : model_.params()) scale(param->grad, ranks_.size());
}

void OuterSteps::end_step(const Groups&, StepReport& report, bool) {
    const auto [H, P] = std::pair(options_.every, options_.fragments);
    for (int64_t p = 0; p < P; ++p)
        if ((report.step + p * H / P) % H == 0 || report.step == last_step_) outer_step(fragments_[size_t(p)]);
}

void OuterSteps::outer_step(Fragment& f) {
    const Span span("outer_step", "phase");
    Tensor d = Tensor::like(f.outer, Memory::comm);
    copy_to_flat(d, f.weights);
    scale(d, -1);
    add(d, d, f.outer);
    ranks_.all_reduce(d).wait();
    scale(d, 1.0 / ranks_.size());
    add(f.velocity, f.velocity, d);
    scale(f.velocity, options_.momentum);
    add(d, d, f.velocity);
    scale(d, -options_.lr);
    add(f.outer, f.outer, d);
    copy_from_flat(f.weights, f.outer);
    states_changed();
}

}  // namespace train70b
