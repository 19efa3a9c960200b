#include "08_3d_full/experts/load_alarm.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "01_single_gpu/complete/experts/expert_balance.h"

namespace train70b {

double LoadAlarm::threshold(double flag, const LlamaConfig& model) {
    if (flag >= 0) return flag;
    if (!model.is_sparse()) return 0;
    return std::min(3.0, (1 + 2 * double(model.experts.count) / double(model.experts.top_k)) / 3);
}

bool LoadAlarm::after_step(const StepReport& report) {
    const ExpertReport* load = experts_of(report);
    if (threshold_ == 0 || !load) return true;
    above_ = load->max_over_mean > threshold_ ? above_ + 1 : 0;
    if (above_ == kSteps)
        trainer_.note(
            fmt::format("alarm: step {}: for {} steps an expert has had more than {} times the mean load, now "
                        "{:.2f} times; {} experts without any token (try a larger --aux-loss)",
                        report.step, kSteps, fmt::format("{:.3g}", threshold_), load->max_over_mean, load->dead),
            {{"event", "alarm"},
             {"kind", "expert_load"},
             {"step", report.step},
             {"max_over_mean", significant_digits(load->max_over_mean)},
             {"dead", load->dead}});
    return true;
}

void LoadAlarm::add_flag(Flags& flags, double& threshold) {
    flags
        .add("--load-alarm", threshold,
             "experts: report a load of one of more than this times the mean, 20 steps in a row; 0: never [default: 3, "
             "or less if experts / top-k is at most 4]",
             real_number(0, kInfinity))
        .default_text("");
}

void LoadAlarm::check(double threshold, const LlamaConfig& model) {
    const ExpertsConfig& x = model.experts;
    if (threshold >= 0 && x.count == 0) usage_error("--load-alarm {}: needs --experts N", threshold);
    if (threshold > 0 && threshold * double(x.top_k) >= double(x.count))
        usage_error("--load-alarm {}: --experts {} / --top-k {} is the largest load of one, all tokens (try {})",
                    threshold, x.count, x.top_k, fmt::format("{:.3g}", LoadAlarm::threshold(-1, model)));
}

}  // namespace train70b
