#include "01_single_gpu/optimizer.h"

#include <cmath>
#include <numbers>

namespace train70b {

std::vector<Segment> whole_segments(const std::vector<Param*>& params) {
    std::vector<Segment> segments;
    for (const Param* param : params)
        segments.push_back({param->data, param->grad, param->is_matrix(), true, param->place(0), param->key(0)});
    return segments;
}

Tensor make_master(const Tensor& param, Memory states) {
    const DType wide = stats_dtype(param.dtype());
    if (param.dtype() == wide) return {};
    Tensor master(param.shape(), wide, param.device(), states);
    copy(master, param);
    return master;
}

int64_t master_bytes(DType param) { return param == stats_dtype(param) ? 0 : size_of(stats_dtype(param)); }

AdamW::AdamW(std::vector<Segment> segments, const Hyper& hyper, Memory states) : hyper_(hyper) {
    for (Segment& segment : segments) {
        const Tensor& param = segment.param;
        const auto zeros = [&] {
            Tensor state(param.shape(), stats_dtype(param.dtype()), param.device(), states);
            fill(state, 0);
            return state;
        };
        states_.push_back({segment, make_master(param, states), zeros(), zeros()});
    }
}

int64_t AdamW::state_bytes(DType param) { return 2 * size_of(stats_dtype(param)) + master_bytes(param); }

AdamWStep AdamW::Hyper::at(int64_t step, double lr, double grad_scale, bool decay) const {
    return {.lr = lr,
            .beta1 = beta1,
            .beta2 = beta2,
            .eps = eps,
            .weight_decay = decay ? weight_decay : 0,
            .grad_scale = grad_scale,
            .step = step};
}

MakeOptimizer AdamW::maker(const Hyper& hyper) {
    return [hyper](std::vector<Segment> segments, Memory states) {
        return std::make_unique<AdamW>(std::move(segments), hyper, states);
    };
}

void AdamW::step(double lr, double grad_scale) {
    ++step_;
    for (State& state : states_)
        adamw(state.segment.param, state.master, state.exp_avg, state.exp_avg_sq, state.segment.grad,
              hyper_.at(step_, lr, grad_scale, state.segment.decay));
}

LrShape lr_shape_of(const std::string& name) {
    if (name == "constant") return LrShape::constant;
    if (name == "linear") return LrShape::linear;
    if (name == "cosine") return LrShape::cosine;
    if (name == "wsd") return LrShape::wsd;
    usage_error("--lr-schedule {}: one of constant linear cosine wsd", name);
}

double LrSchedule::at(int64_t step) const {
    if (step <= warmup) return peak * double(step) / double(warmup);
    const int64_t begin = shape == LrShape::wsd ? std::max(warmup, steps - steps / 5) : warmup;  // where it starts down
    if (shape == LrShape::constant || step <= begin) return peak;
    const double done = std::min(1.0, double(step - begin) / double(std::max<int64_t>(steps - begin, 1)));
    const double left = shape == LrShape::cosine ? 0.5 * (1 + std::cos(std::numbers::pi * done)) : 1 - done;
    return min + (peak - min) * left;
}

}  // namespace train70b
