#pragma once
// What watches a run of weeks: loss spikes, the gradient noise scale.
#include "08_3d_full/watch/alarms.h"
#include "08_3d_full/watch/noise_scale.h"

namespace train70b {

struct WatchOptions {
    int64_t spike_window = 64;  // steps; 0: no alarm
    double spike_z = 6;
    bool noise_scale = false;
};
void add_watch_flags(CommandLine& flags, WatchOptions& options);
// Usage error for a dry run, in which there is nothing to watch.
void check_watch(const WatchOptions& options, const TrainOptions& training);

class Watch {
  public:
    explicit Watch(const WatchOptions& options) : options_(options) {}
    Watch(const Watch&) = delete;
    // Adds its controls. Call it before the store is made, inside of which the noise scale wraps the units; this outlives
    // the run.
    void add_to(Trainer& trainer, Llama& model, const TrainOptions& training);

  private:
    const WatchOptions options_;
    std::optional<SpikeAlarm> spike_alarm_;
    std::optional<NoiseScale> noise_scale_;
};

}  // namespace train70b
