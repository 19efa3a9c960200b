#include "02_data_parallel/runtime/measure.h"

#include <algorithm>
#include <utility>

namespace train70b {

namespace {

class MeasuringRuntime : public CommRuntime {
  public:
    using CommRuntime::CommRuntime;
    void end_step(StepReport& report) override {
        stats = world_.take_stats();
        add(stats, report);
    }
    CommStats stats;
};

}  // namespace

int64_t MeasuredStep::wire_bytes(const std::string& suffix) const {
    int64_t bytes = 0;
    for (const auto& [operation, entry] : comm.operations)
        if (operation.ends_with(suffix) && !operation.ends_with(".scalar")) bytes += entry.bytes;
    return bytes;
}

std::vector<MeasuredStep> measure_steps(Trainer& trainer, const Comm& ranks, int64_t count, int64_t first) {
    MeasuringRuntime runtime(ranks);
    Runtime* const before = std::exchange(trainer.runtime, &runtime);
    std::vector<MeasuredStep> steps;
    if (first == 1) trainer.start();
    for (int64_t number = first; number < first + count; ++number) {
        ranks.barrier().wait();
        MeasuredStep& step = steps.emplace_back(MeasuredStep{.report = trainer.step(number)});
        step.comm = std::exchange(runtime.stats, {});
        step.slowest_s = ranks.max(step.report.step_s);
    }
    trainer.runtime = before;
    return steps;
}

FreshRun::FreshRun(const TrainOptions& o, const Dataset& data, const std::optional<Stage>& stage)
    : options(o.without_files()),
      model(options.model, options.llama(), stage.value_or(full_model(options.model))),
      trainer(options, model, data) {}

std::vector<MeasuredStep> FreshRun::measure(const Comm& ranks, int64_t count) {
    if (steps_done_ == 0) trainer.allocate();
    std::vector<MeasuredStep> steps = measure_steps(trainer, ranks, count, steps_done_ + 1);
    steps_done_ += count;
    for (MeasuredStep& step : steps) step.report.peak = step.report.peak.above(held_);
    return steps;
}

bool possible(const std::string& name, const std::function<void()>& checks) {
    try {
        checks();
    } catch (const UsageError& error) {
        if (!name.empty()) say("{} left out: {}\n", name, error.what());
        return false;
    }
    return true;
}

std::vector<std::vector<double>> alternate(size_t forms, double budget, const std::function<double(size_t)>& time,
                                           int least, int most) {
    std::vector<std::vector<double>> seconds(forms);
    int rounds = least;
    for (int round = -1; round < rounds; ++round) {
        double all = 0;
        for (size_t i = 0; i < forms; ++i) {
            const size_t form = (i + size_t(round + 1)) % forms;
            const double one = time(form);
            all += one;
            if (round >= 0) seconds[form].push_back(one);
        }
        if (round < 0) rounds = std::clamp(int(budget / all), least, most);
    }
    return seconds;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.empty() ? 0 : values[values.size() / 2];
}

}  // namespace train70b
