#include "08_3d_full/plan/budget.h"

#include <cmath>

namespace train70b {

namespace {
constexpr double kE = 1.69, kA = 406.4, kB = 410.7, kAlpha = 0.34, kBeta = 0.28;  // Hoffmann et al., equation 10
}

double tokens_per_day(double tokens_per_s) { return tokens_per_s * kSecondsPerDay; }

RunCost run_cost(double tokens, double tokens_per_s, double gpus, double price_per_gpu_hour) {
    const double seconds = tokens / tokens_per_s, hours = gpus * seconds / 3600;
    return {seconds / kSecondsPerDay, hours, hours * price_per_gpu_hour};
}

double checkpoint_bytes(double parameters, double bytes_per_parameter) { return parameters * bytes_per_parameter; }

ModelAndTokens chinchilla_by_ratio(double flops, double tokens_per_parameter) {
    const double parameters = std::sqrt(flops / (6 * tokens_per_parameter));
    return {parameters, tokens_per_parameter * parameters};
}

ModelAndTokens chinchilla_by_fit(double flops) {
    const double g = std::pow(kAlpha * kA / (kBeta * kB), 1 / (kAlpha + kBeta)), nd = flops / 6;
    return {g * std::pow(nd, kBeta / (kAlpha + kBeta)), std::pow(nd, kAlpha / (kAlpha + kBeta)) / g};
}

double chinchilla_loss(double parameters, double tokens) {
    return kE + kA / std::pow(parameters, kAlpha) + kB / std::pow(tokens, kBeta);
}

double steps_factor(double batch, double noise_scale) { return 1 + noise_scale / batch; }
double tokens_factor(double batch, double noise_scale) { return 1 + batch / noise_scale; }

double kaplan_critical_batch(double loss) { return 2.1e8 / std::pow(loss, 1 / 0.21); }

}  // namespace train70b
