#pragma once
// Training steps as a run does them, measured: what every table of the chapters stands on.
#include "01_single_gpu/complete/trainer.h"
#include "02_data_parallel/runtime/comm_roles.h"

namespace train70b {

struct MeasuredStep {
    StepReport report;  // step_s: of this rank; peak: of this step
    CommStats comm;
    double slowest_s = 0;  // step_s of the slowest rank
    // Bytes sent by operations whose name ends in `suffix`, without the scalars of losses and norms.
    int64_t wire_bytes(const std::string& suffix = "") const;
};
// Steps first, first + 1, ... of a trainer whose store is allocated; step 1 starts it. Before each of them the ranks
// meet in a barrier; in the meantime the trainer's runtime is one that measures. Collective.
std::vector<MeasuredStep> measure_steps(Trainer& trainer, const Comm& ranks, int64_t count, int64_t first = 1);

// A model and a trainer for the runs behind a table: they write and load nothing. A chapter gives the trainer its
// roles.
class FreshRun {
    const MemoryBytes held_ = ledger().now();

  public:
    FreshRun(const TrainOptions& options, const Dataset& data, const std::optional<Stage>& stage = {});

    // The next `count` steps, as measure_steps(); the first call allocates. The peaks are without what was held before
    // this run was made.
    std::vector<MeasuredStep> measure(const Comm& ranks, int64_t count = 1);

    const TrainOptions options;
    Llama model;
    Trainer trainer;

  private:
    int64_t steps_done_ = 0;
};

// Whether the checks pass; if not, prints that `name` is left out of a table, and why. An empty name: prints nothing.
bool possible(const std::string& name, const std::function<void()>& checks);

// Times of `forms` (0, 1, ...) in alternating rounds, so that a machine that slows down slows all of them down; each
// round begins with another form. time(form): seconds of one, the same number on all ranks. The first round does not
// count; as many rounds follow as `budget` seconds hold, within least to most. Returns [form][round].
std::vector<std::vector<double>> alternate(size_t forms, double budget, const std::function<double(size_t form)>& time,
                                           int least = 3, int most = 15);
double median(std::vector<double> values);

}  // namespace train70b
