#pragma once
// --bench: the device's measured limits, the time of a training step, and the time of each op against its lower bound.
#include "01_single_gpu/complete/flags/options.h"
#include "01_single_gpu/complete/run/training_run.h"

namespace train70b {

// Median seconds of `calls` calls of body, after warmup calls (one, on a GPU three). The device is synchronized after
// each.
double median_seconds(Device device, int calls, const std::function<void()>& body);

// Trains a few steps without watching (their median is the step time), then a few with every op timed by itself (on a
// GPU by events, without a wait of the host), and prints the table. An op's floor is the larger of its bytes over the
// copy bandwidth and its FLOPs over the product rate.
class Bench {
  public:
    void add_flags(CommandLine& flags);  // --bench, --bench-side, --bench-csv
    bool asked() const { return bench_ || csv_.given(); }
    // Before the run is constructed: opens the file. Usage error for flags that --bench ignores.
    void open(const TrainOptions& options, const CommandLine& flags);
    void run(const TrainOptions& options, TrainingRun& run);

  private:
    bool bench_ = false;
    int64_t side_ = 0, warm_ms_ = 0;
    OptionalOutput csv_{"--bench-csv"};  // op,calls,ms,floor_ms,share,gflops,gbytes_per_s
};

}  // namespace train70b
