#include "01_single_gpu/complete/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "01_single_gpu/core/registry.h"

namespace train70b {

namespace {

// 0 at `begin`, 1 at the last step.
double progress(double step, double begin, double steps) {
    if (step <= begin) return 0;
    return std::min(1.0, (step - begin) / std::max(steps - begin, 1.0));
}

double constant(double, double, double) { return 1; }
double linear(double step, double warmup, double steps) { return 1 - progress(step, warmup, steps); }
double cosine(double step, double warmup, double steps) {
    return 0.5 * (1 + std::cos(std::numbers::pi * progress(step, warmup, steps)));
}
// Warmup, stable, decay: decays linearly over the last fifth of all steps, as in Haegele et al. 2024. (MiniCPM, Hu et
// al. 2024, which introduced the name, decays exponentially over about the last tenth.)
double wsd(double step, double warmup, double steps) {
    return 1 - progress(step, std::max(warmup, steps - std::floor(steps / 5)), steps);
}

}  // namespace

const std::vector<LrShape>& lr_shapes() {
    static const std::vector<LrShape> shapes = {
        {"constant", "stays at the peak", constant},
        {"linear", "decays linearly to --min-lr", linear},
        {"cosine", "decays to --min-lr along half a cosine", cosine},
        {"wsd", "stays at the peak, then decays linearly over the last fifth of the steps", wsd}};
    return shapes;
}

const LrShape& lr_shape(const std::string& name) { return find_entry(lr_shapes(), "--lr-schedule", name); }

double LrSchedule::at(double step) const {
    if (step <= warmup) return peak * step / warmup;
    const double factor = lr_shape(shape).factor(step, warmup, steps);
    return factor == 1 ? peak : min + (peak - min) * factor;
}

}  // namespace train70b
