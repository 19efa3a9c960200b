#include "08_3d_full/watch/noise_scale.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "01_single_gpu/core/say.h"

namespace train70b {

// tag::moments[]
void NoiseMoments::add(double small, double big, double b_small, double b_big) {
    gradient = kDecay * gradient + (1 - kDecay) * (b_big * big - b_small * small) / (b_big - b_small);
    noise = kDecay * noise + (1 - kDecay) * (small - big) / (1 / b_small - 1 / b_big);
    weight = kDecay * weight + (1 - kDecay);
}

double NoiseMoments::scale() const {
    return gradient > 0 && noise > 0 ? noise / gradient : std::numeric_limits<double>::quiet_NaN();
}
// end::moments[]

NoiseScale::NoiseScale(Trainer& trainer) : trainer_(trainer) {
    Llama& model = trainer.model;
    int64_t count = 0;
    for (Unit* unit : model.units()) {
        const size_t i = matrices_.size();
        first_sum_.push_back(count);
        auto& matrices = matrices_.emplace_back();
        for (Param* param : unit->params)
            if (model.is_matrix_of_one_use(*param)) matrices.push_back(param);
        count += int64_t(matrices.size());
        // Recorded before the forward pass: runs after the backward pass. A zero-bubble schedule defers the weight
        // gradients of linear layers, but not the embedding's.
        const bool deferred = unit != &model.embedding_unit;
        unit->wrappers.insert(unit->wrappers.begin(),
                              [this, i, deferred](Tape& tape, const Var& x, const Unit::Body& body) {
                                  const auto ended = [this, i] { backward_ended(i); };
                                  deferred ? tape.record_wgrad(ended) : tape.record(ended);
                                  return body(tape, x);
                              });
    }
    measured_.resize(matrices_.size());
    sums_ = Tensor({std::max<int64_t>(count, 1)}, DType::f64, model.options.device, Memory::workspace);
}

std::string NoiseScale::why_not() const {
    const Groups& groups = trainer_.groups;
    if (const int cp = groups.dp_cp->size() / groups.dp->size(); cp > 1)
        return fmt::format("with --cp {} a rank's gradient is of parts of sequences", cp);
    for (const Param* param : trainer_.model.params())
        if (trainer_.model.is_matrix_of_one_use(*param) && param->partial_grad_group)
            return fmt::format("with --tp {} a rank's gradients of {} are partial", groups.tp->size(), param->name);
    if (trainer_.model.config.multi_token) return "with --mtp on the head has two gradients";
    if (trainer_.options.fp16()) return "with --dtype fp16 gradients are scaled";
    if (trainer_.model.options.loss_chunk > 0 && groups.pp->size() > 1)
        return "with --loss-chunk a pipeline's next micro-batch adds to the head's gradient early";
    if (trainer_.options.global_batch == trainer_.options.micro_batch)
        return "the global batch is one micro-batch of one rank (try a smaller --micro-batch)";
    return "";
}

void NoiseScale::before_step(int64_t) {
    if (!begun_) {
        const std::string why = why_not();
        if (!why.empty()) trainer_.note("noise scale: not measured: " + why, nullptr);
        measures_ = why.empty();
        begun_ = true;
    }
    std::fill(measured_.begin(), measured_.end(), false);
    fill(sums_, 0);
}

void NoiseScale::backward_ended(size_t unit) {
    if (!measures_ || measured_[unit]) return;
    measured_[unit] = true;
    int64_t number = first_sum_[unit];
    for (const Param* param : matrices_[unit]) {
        Tensor sum = sums_.row_slice(number, number + 1);
        if (param->replica == 0) sum_squares(sum, param->grad);
        ++number;
    }
}

void NoiseScale::gradients_ready(int64_t) {
    if (!measures_) return;
    const std::vector<double> small = read(sums_);
    squares_ = {std::accumulate(small.begin(), small.end(), 0.0), trainer_.store->matrix_squares()};
}

void NoiseScale::complete(StepReport& report) {
    if (!measures_) return;
    const std::vector<double> sums = trainer_.groups.sum(squares_);
    const double ranks = double(trainer_.groups.dp->size()), b_small = double(trainer_.options.micro_batch);
    const double parts = double(trainer_.micro_batches(report.step)) * ranks;
    // The loss is scaled by the tokens of the global batch, so a micro-batch's gradient is 1 / parts of its mean.
    if (parts > 1) moments_.add(sums[0] / ranks * parts * parts, sums[1], b_small, b_small * parts);
    report.noise_scale = moments_.scale() * double(trainer_.options.seq_len);
}

void NoiseScale::finish() {
    if (!measures_ || moments_.weight == 0) return;
    const double sequences = moments_.scale();
    const int64_t seq_len = trainer_.options.seq_len;
    if (moments_.weight < NoiseMoments::kEnough)
        return trainer_.note("noise scale: not known yet: fewer than 20 steps were measured", nullptr);
    trainer_.note(
        std::isfinite(sequences)
            ? fmt::format("noise scale {} tokens: the critical batch is about {:.{}f} sequences of {}",
                          human_count(sequences * double(seq_len)), sequences, sequences < 10 ? 1 : 0, seq_len)
            : "noise scale: not known yet: an average of its two estimates is not positive (try more --steps)",
        nullptr);
}

}  // namespace train70b
