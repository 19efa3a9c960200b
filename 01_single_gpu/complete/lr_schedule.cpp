#include "01_single_gpu/complete/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "01_single_gpu/core/registry.h"

namespace train70b {

namespace {

// 0 at `begin`, 1 at the last step.
double progress(int64_t step, int64_t begin, int64_t steps) {
    if (step <= begin) return 0;
    return std::min(1.0, double(step - begin) / double(std::max<int64_t>(steps - begin, 1)));
}

double constant(int64_t, int64_t, int64_t) { return 1; }
double linear(int64_t step, int64_t warmup, int64_t steps) { return 1 - progress(step, warmup, steps); }
double cosine(int64_t step, int64_t warmup, int64_t steps) {
    return 0.5 * (1 + std::cos(std::numbers::pi * progress(step, warmup, steps)));
}
// Warmup, stable, decay: decays linearly over the last fifth of all steps, as in Haegele et al. 2024. (MiniCPM, Hu et
// al. 2024, which introduced the name, decays exponentially over about the last tenth.)
double wsd(int64_t step, int64_t warmup, int64_t steps) {
    return 1 - progress(step, std::max(warmup, steps - steps / 5), steps);
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

double LrSchedule::at(int64_t step) const {
    if (step <= warmup) return peak * double(step) / double(warmup);
    const double factor = lr_shape(shape).factor(step, warmup, steps);
    return factor == 1 ? peak : min + (peak - min) * factor;
}

}  // namespace train70b
