#include "01_single_gpu/complete/optimizer.h"

namespace train70b {

std::vector<Segment> full_segments(const std::vector<Param*>& params) {
    std::vector<Segment> segments;
    for (const Param* param : params) segments.push_back({param, 0, param->data, param->grad});
    return segments;
}

Tensor make_master(const Tensor& param, Memory states) {
    const DType stats = stats_dtype(param.dtype());
    if (param.dtype() == stats) return {};
    Tensor master(param.shape(), stats, param.device(), states);
    copy(master, param);
    return master;
}

int64_t master_bytes(DType param) { return param == stats_dtype(param) ? 0 : size_of(stats_dtype(param)); }

AdamW::AdamW(std::vector<Segment> segments, const Hyper& hyper, Memory states) : hyper_(hyper) {
    for (const Segment& segment : segments) {
        const Tensor& data = segment.data;
        const auto moment = [&] { return zeros(data.shape(), stats_dtype(data.dtype()), data.device(), states); };
        states_.push_back({segment, make_master(data, states), moment(), moment()});
    }
}

int64_t AdamW::state_bytes(DType param) { return 2 * size_of(stats_dtype(param)) + master_bytes(param); }

// Per step a weight loses lr * weight_decay of itself, whatever its lr_scale.
AdamWStep AdamW::Hyper::at(int64_t step, double lr, double grad_scale, const Segment& segment) const {
    const double lr_scale = segment.param->lr_scale;
    return {.lr = lr * lr_scale,
            .beta1 = beta1,
            .beta2 = beta2,
            .eps = eps,
            .weight_decay = segment.decays() ? weight_decay / lr_scale : 0,
            .grad_scale = grad_scale,
            .step = step};
}

void AdamW::update(int64_t step, double lr, double grad_scale) {
    for (State& state : states_) update_segment(state, hyper_.at(step, lr, grad_scale, state.segment));
}

void AdamW::update_segment(State& state, const AdamWStep& step) {
    adamw(state.segment.data, state.master, state.exp_avg, state.exp_avg_sq, state.segment.grad, step);
}

void AdamW::weights_changed() {
    for (State& state : states_)
        if (state.master) copy(state.master, state.segment.data);
}

void AdamW::for_each_state(const StateVisitor& visit) {
    for (State& state : states_) {
        visit(state.segment, "weight", state.weight());
        visit(state.segment, "exp_avg", state.exp_avg);
        if (state.exp_avg_sq) visit(state.segment, "exp_avg_sq", state.exp_avg_sq);
        if (state.scale) visit(state.segment, "scale", state.scale);
    }
}

void AdamW::states_changed() {
    for (State& state : states_)
        if (state.master) copy(state.segment.data, state.master);
}

}  // namespace train70b
