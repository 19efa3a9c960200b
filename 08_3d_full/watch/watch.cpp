#include "08_3d_full/watch/watch.h"

namespace train70b {

void add_watch_flags(CommandLine& flags, WatchOptions& o) {
    flags.group("Output");
    flags.add("--spike-window", o.spike_window, "steps that a loss is compared with, to report a spike; 0: never",
              integer_from(0));
    flags.add("--spike-z", o.spike_z, "report a loss this many standard deviations above the recent ones",
              real_number(0, kInfinity, false));
    flags.add_switch("--noise-scale", o.noise_scale, "measure the gradient noise scale: the critical batch size");
}

void check_watch(const WatchOptions& o, const TrainOptions& training) {
    if (training.dry_run && o.noise_scale)
        usage_error("--noise-scale on: a dry run computes no gradients; leave it out");
}

void Watch::add_to(Trainer& trainer, Llama& model, const TrainOptions& training) {
    trainer.controls.push_back(&spike_alarm_.emplace(trainer, options_.spike_window, options_.spike_z));
    if (options_.noise_scale) trainer.controls.push_back(&noise_scale_.emplace(trainer, model, training));
}

}  // namespace train70b
