#include "08_3d_full/watch/watch.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "08_3d_full/experts/load_alarm.h"

namespace train70b {

namespace {
// The value below which a fraction of the values lies.
double quantile(const std::deque<double>& values, double fraction) {
    std::vector<double> sorted(values.begin(), values.end());
    std::sort(sorted.begin(), sorted.end());
    const double place = fraction * double(sorted.size() - 1);
    const auto below = size_t(place), above = std::min(below + 1, sorted.size() - 1);
    return sorted[below] + (place - double(below)) * (sorted[above] - sorted[below]);
}

void push(std::deque<double>& window, double value, size_t length) {
    window.push_back(value);
    if (window.size() > length) window.pop_front();
}
}  // namespace

std::optional<LossSpikes::Spike> LossSpikes::add(double loss) {
    if (window_ == 0) return {};
    std::optional<Spike> spike;
    if (recent_.size() == kRecent) {
        const double recent = quantile(recent_, 0.5), residual = loss - recent;
        if (residuals_.size() >= std::min(window_, kFirst)) {
            const double spread = (quantile(residuals_, 0.75) - quantile(residuals_, 0.25)) / 1.349;
            const double scale = std::max(spread, 0.005 * std::abs(recent));
            const double z = (residual - std::max(0.0, quantile(residuals_, 0.5))) / scale;
            const bool above = !(z <= z_);
            if (above && !in_spike_) spike = {loss, recent, z};
            in_spike_ = above;
        }
        push(residuals_, residual, window_);
    }
    push(recent_, loss, kRecent);
    return spike;
}

bool SpikeAlarm::after_step(const StepReport& report) {
    if (report.targets == 0) return true;  // no loss at all
    if (const auto spike = spikes_.add(report.loss))
        trainer_.note(
            fmt::format("alarm: step {}: loss {:.4f} is {:.1f} standard deviations above {:.4f}, the median of "
                        "the steps before it",
                        report.step, spike->loss, spike->z, spike->recent),
            {{"event", "alarm"},
             {"kind", "loss_spike"},
             {"step", report.step},
             {"loss", significant_digits(spike->loss)},
             {"recent_loss", significant_digits(spike->recent)},
             {"z", significant_digits(spike->z)}});
    return true;
}

void add_watch_flags(CommandLine& flags, WatchOptions& o) {
    flags.group("Output");
    flags.add("--spike-window", o.spike_window, "steps that a loss is compared with, to report a spike; 0: never",
              integer_from(0));
    flags.add("--spike-z", o.spike_z, "report a loss this many standard deviations above the recent ones",
              real_number(0, kInfinity, false));
    LoadAlarm::add_flag(flags, o.load_alarm);
    flags.add_switch("--noise-scale", o.noise_scale, "measure the gradient noise scale: the critical batch size");
}

void check_watch(const WatchOptions& o, const TrainOptions& training) {
    if (o.noise_scale && training.model.is_sparse())
        usage_error("--noise-scale on: not supported with --experts, of which a rank has the rows of several");
    LoadAlarm::check(o.load_alarm, training.model);
    if (training.dry_run && o.noise_scale)
        usage_error("--noise-scale on: a dry run computes no gradients; leave it out");
}

Watch::Watch(const WatchOptions& o, Trainer& trainer)
    : spike_alarm_(trainer, o.spike_window, o.spike_z),
      load_alarm_(std::make_unique<LoadAlarm>(trainer, LoadAlarm::threshold(o.load_alarm, trainer.model.config))) {
    trainer.controls.insert(trainer.controls.end(), {&spike_alarm_, load_alarm_.get()});
    if (o.noise_scale) trainer.controls.push_back(&noise_scale_.emplace(trainer));
}

}  // namespace train70b
