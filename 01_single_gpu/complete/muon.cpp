#include "01_single_gpu/complete/muon.h"

#include <algorithm>
#include <cmath>

namespace train70b {

namespace {
constexpr double kMomentum = 0.95, kUpdateRms = 0.2;
constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;

Tensor times(const Tensor& x, double factor) {
    Tensor y = Tensor::like(x, Memory::workspace);
    copy(y, x);
    scale(y, factor);
    return y;
}
}  // namespace

Tensor orthogonalized(const Tensor& u, DType dtype) {
    const bool tall = u.shape()[0] > u.shape()[1];
    const Tensor rounded = converted(u, dtype, u.device());
    Tensor x = times(rounded, 1 / std::max(std::sqrt(total_squares({rounded})), 1e-7));
    for (int step = 0; step < kNewtonSchulzSteps; ++step) {
        const Tensor A = matmul(x, x, tall ? Transpose::a : Transpose::b, Memory::workspace);
        Tensor B = times(A, kB / kC), next = times(x, kA);
        matmul_into(B, A, A, Transpose::none, 1);
        scale(B, kC);
        matmul_into(next, tall ? x : B, tall ? B : x, Transpose::none, 1);
        x = next;
    }
    return x;
}

double newton_schulz_flops(int64_t rows, int64_t cols) {
    const double small = double(std::min(rows, cols)), large = double(std::max(rows, cols));
    return kNewtonSchulzSteps * (4 * small * small * large + 2 * small * small * small);
}

bool takes_muon(const Param& param) {
    return param.is_matrix() && param.name != "model.embed_tokens.weight" && param.name != "lm_head.weight";
}

int64_t muon_elements(const LlamaConfig& c) {
    const int64_t module = c.multi_token ? c.block_vectors() + 3 * c.hidden : 0;
    return c.parameters() - c.layers * c.block_vectors() - module - c.hidden - (c.tied ? 1 : 2) * c.vocab * c.hidden;
}

double muon_share(const LlamaConfig& config) { return double(muon_elements(config)) / double(config.parameters()); }

void check_muon(bool mup, bool offloads) {
    if (offloads)
        usage_error(
            "--offload: --optimizer muon's products are the device's (try --offload none, or --optimizer adamw)");
    if (mup)
        usage_error(
            "--optimizer muon: its updates have one size at any width, --mup is AdamW's (try --optimizer adamw)");
}

void Orthogonalizer::orthogonalize() {
    for (Segment& segment : segments_) {
        const int64_t rows = segment.param->matrix_rows(), cols = segment.param->local.cols;
        for (int64_t begin = 0; begin < segment.grad.size(); begin += rows * cols) {
            Tensor u = segment.grad.element_slice(begin, {rows, cols});
            copy(u, orthogonalized(u, segment.data.dtype()));
        }
    }
}

// First the matrices, of which there is one moment.
Muon::Muon(std::vector<Segment> segments, const Hyper& hyper, std::shared_ptr<Orthogonalizer> matrices, Memory states)
    : AdamW(hyper), matrices_(std::move(matrices)) {
    const auto is_matrix = [](const Segment& segment) { return takes_muon(*segment.param); };
    std::stable_partition(segments.begin(), segments.end(), is_matrix);
    for (const Segment& segment : segments) {
        const Tensor& data = segment.data;
        const auto moment = [&] { return zeros(data.shape(), stats_dtype(data.dtype()), data.device(), states); };
        const bool matrix = is_matrix(segment);
        states_.push_back({segment, make_master(data, states), moment(), matrix ? Tensor() : moment()});
        if (matrix) matrices_->add(segment);
    }
}

void Muon::prepare(double grad_scale) {
    for (State& state : states_) {
        if (!takes_muon(*state.segment.param)) continue;
        Tensor& u = state.segment.grad;
        scale(u, (1 - kMomentum) * grad_scale);
        scale(state.exp_avg, kMomentum);
        add(state.exp_avg, state.exp_avg, u);
        add(u, u, times(state.exp_avg, kMomentum));
    }
    matrices_->prepare();
}

void Muon::update(int64_t step, double lr, double grad_scale) {
    matrices_->run();  // also where this one has none
    AdamW::update(step, lr, grad_scale);
}

void Muon::update_segment(State& state, const AdamWStep& step) {
    if (!takes_muon(*state.segment.param)) return AdamW::update_segment(state, step);
    const Param& param = *state.segment.param;
    Tensor &u = state.segment.grad, &w = state.weight();
    scale(u, -step.lr * kUpdateRms * std::sqrt(double(std::max(param.matrix_rows(), param.global_shape[1]))));
    scale(w, 1 - step.lr * step.weight_decay);
    add(w, w, u);
    if (state.master) copy(state.segment.data, w);
}

}  // namespace train70b
