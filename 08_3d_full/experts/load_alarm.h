#pragma once
// The load of experts: an alarm once the busiest expert of a layer has had more than --load-alarm times the mean load
// in each of kSteps steps; again only after a step below.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "01_single_gpu/complete/experts/expert_balance.h"
#include "01_single_gpu/complete/flags/flags.h"
#include "01_single_gpu/complete/trainer.h"

namespace train70b {

class LoadAlarm : public RunControl {
  public:
    static constexpr int kSteps = 20;
    LoadAlarm(Trainer& trainer, double threshold) : trainer_(trainer), threshold_(threshold) {}  // 0: never

    bool after_step(const StepReport& report) override {
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

    static void add_flag(Flags& flags, double& threshold) {
        flags
            .add("--load-alarm", threshold,
                 "experts: report a load of one of more than this times the mean, 20 steps in a row; 0: never "
                 "[default: 3, or less if experts / top-k is at most 4]",
                 real_number(0, kInfinity))
            .default_text("");
    }
    // Of a flag that is not given, below 0: 3, or two thirds of the way from an even load, 1, to the largest that there
    // can be, N / k; 0 for a dense model.
    static double threshold(double flag, const LlamaConfig& model) {
        if (flag >= 0) return flag;
        if (!model.is_sparse()) return 0;
        return std::min(3.0, (1 + 2 * double(model.experts.count) / double(model.experts.top_k)) / 3);
    }
    static void check(double flag, const LlamaConfig& model) {  // usage error for a load that no expert can have
        const ExpertsConfig& x = model.experts;
        if (flag >= 0 && x.count == 0) usage_error("--load-alarm {}: needs --experts N", flag);
        if (flag > 0 && flag * double(x.top_k) >= double(x.count))
            usage_error("--load-alarm {}: --experts {} / --top-k {} is the largest load of one, all tokens (try {})",
                        flag, x.count, x.top_k, fmt::format("{:.3g}", threshold(-1, model)));
    }

  private:
    Trainer& trainer_;
    const double threshold_;
    int above_ = 0;  // steps in a row
};

}  // namespace train70b
