#include "01_single_gpu/complete/skip_step.h"

#include <cmath>

#include "01_single_gpu/complete/step_report.h"

namespace train70b {

static bool is_spike(double value, const std::deque<float>& window) {
    double mean = 0, squares = 0;
    for (const float x : window) mean += double(x) / double(window.size());
    for (const float x : window) squares += (x - mean) * (x - mean);
    return value - mean > SkipStep::kSigmas * std::sqrt(squares / double(window.size() - 1));
}

bool SkipStep::skips(const StepReport& report) const {
    return losses_.size() >= kFirst && (is_spike(report.loss, losses_) || is_spike(report.grad_norm, norms_));
}

void SkipStep::end_step(const Groups&, StepReport& report, bool updated) {
    if (report.skipped.value_or(false) && ++in_a_row_ == kWindow)
        throw CommonError(
            fmt::format("step {}: --skip-step on has skipped {} steps in a row (try a lower --lr, or --skip-step off)",
                        report.step, kWindow));
    if (!updated) return;
    in_a_row_ = 0;
    for (auto [window, value] : {std::pair(&losses_, report.loss), std::pair(&norms_, report.grad_norm)}) {
        window->push_back(float(value));
        if (window->size() > kWindow) window->pop_front();
    }
}

// A row: the steps in the window, or skipped in a row, and the window.
StepState::Rows SkipStep::rows() const {
    Rows rows{.kind = "skip_step/", .names = {"losses", "grad_norms"}, .width = 1 + kWindow, .values = {}};
    for (const auto& [window, count] : {std::pair(&losses_, losses_.size()), std::pair(&norms_, in_a_row_)}) {
        rows.values.push_back(float(count));
        rows.values.insert(rows.values.end(), window->begin(), window->end());
        rows.values.resize(rows.values.size() + kWindow - window->size());
    }
    return rows;
}

}  // namespace train70b
