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

int64_t MeasuredStep::wire_bytes() const {
    int64_t bytes = 0;
    for (const auto& [operation, entry] : comm.operations)
        if (!operation.ends_with(".scalar")) bytes += entry.bytes;
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

std::vector<std::vector<double>> alternate(size_t forms, double budget, const std::function<double(size_t)>& time) {
    constexpr int kLeast = 3, kMost = 15;
    std::vector<std::vector<double>> seconds(forms);
    int rounds = kLeast;
    for (int round = -1; round < rounds; ++round) {
        double all = 0;
        for (size_t form = 0; form < forms; ++form) {
            const double one = time(form);
            all += one;
            if (round >= 0) seconds[form].push_back(one);
        }
        if (round < 0) rounds = std::clamp(int(budget / all), kLeast, kMost);
    }
    return seconds;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.empty() ? 0 : values[values.size() / 2];
}

}  // namespace train70b
