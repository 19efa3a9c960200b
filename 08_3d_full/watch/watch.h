#pragma once
// Alarms: what a run of weeks must not go on with unnoticed. A loss spike is one line and one metrics event; a loss or
// gradient that is not finite ends the run (compare_ranks in trainer.cpp).
#include <deque>

#include "01_single_gpu/complete/flags/options.h"
#include "08_3d_full/watch/noise_scale.h"

namespace train70b {

// A z-score of the step's loss against a sliding window, with medians for means, since a mean that contains a spike
// hides the next one:
//   r = loss - median of the previous 8 losses             the trend is taken out: a decrease makes r negative
//   z = (r - max(0, median of r)) / scale                  over the last `window` steps
//   scale = (upper quartile of r - lower quartile) / 1.349, the standard deviation of normal noise; at least 0.5% of
//           the loss
// The fast decrease at the start raises no alarm, because only a loss above the recent ones has z > 0, and what it adds
// to the scale has left the window after `window` steps. The first steps, until 16 values of r are there, raise none.
class LossSpikes {
  public:
    LossSpikes(int64_t window, double z) : window_(size_t(window)), z_(z) {}  // window 0: never

    struct Spike {
        double loss, recent, z;  // recent: median of the previous losses
    };
    // The loss of the next step. A spike is returned once, at its first step, not at those that follow it.
    std::optional<Spike> add(double loss);

  private:
    static constexpr size_t kRecent = 8, kFirst = 16;  // losses

    const size_t window_;
    const double z_;
    std::deque<double> recent_, residuals_;
    bool in_spike_ = false;
};

class SpikeAlarm : public RunControl {
  public:
    SpikeAlarm(Trainer& trainer, int64_t window, double z) : trainer_(trainer), spikes_(window, z) {}
    bool after_step(const StepReport& report) override;

  private:
    Trainer& trainer_;
    LossSpikes spikes_;
};

struct WatchOptions {
    int64_t spike_window = 64;  // steps; 0: no alarm
    double spike_z = 6;
    double load_alarm = -1;  // < 0: LoadAlarm::threshold
    bool noise_scale = false;
};
void add_watch_flags(CommandLine& flags, WatchOptions& options);
// Usage error for a dry run, in which there is nothing to watch, and for a load that cannot be.
void check_watch(const WatchOptions& options, const TrainOptions& training);

class Watch {
  public:
    // Adds its controls. Construct it before the store, inside of which the noise scale wraps the units. It outlives
    // the run.
    Watch(const WatchOptions& options, Trainer& trainer);
    Watch(const Watch&) = delete;

  private:
    SpikeAlarm spike_alarm_;
    std::unique_ptr<RunControl> load_alarm_;  // LoadAlarm
    std::optional<NoiseScale> noise_scale_;
};

}  // namespace train70b
