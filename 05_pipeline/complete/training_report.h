#pragma once
// What a pipeline's run shows: its schedule by formula, simulated from measured times of its steps, and as measured.
#include "02_data_parallel/runtime/program.h"
#include "05_pipeline/complete/pipeline.h"

namespace train70b {

// Measures the last four steps of a run but its first, and keeps the quickest. Collective over the stages.
class PipelineWatch : public RunControl {
  public:
    PipelineWatch(Trainer& trainer, Pipeline& pipeline, const Comm& stages, Schedule schedule);
    void before_step(int64_t step) override;
    bool after_step(const StepReport& step) override;
    void finish() override;  // simulates the schedule with the medians of the measured F, B, I and W, and the hop

    const Schedule schedule;
    Timeline measured, simulated;
    std::vector<MemoryPeak> memory;  // of that step, by rank
    std::vector<int64_t> in_flight;  // by rank

  private:
    Trainer& trainer_;
    Pipeline& pipeline_;
    const Comm stages_;
    bool measures_ = false;  // this step
};

void say_layout(const Program& program, const Schedule& schedule);

class PipelineReport {
  public:
    explicit PipelineReport(CommandLine& flags);  // adds --draw, --pipeline-trace
    // Checks that the stages and the schedule are possible, then opens the files; usage errors.
    void open(const Program& program, int64_t pp, const PipelineOptions& options);
    void watch(Program& program, Pipeline& pipeline, const Comm& stages, const Schedule& schedule);
    void print(const Program& program);  // after the training

  private:
    OptionalOutput draw_{"--draw"}, trace_{"--pipeline-trace"};
    std::string python_;
    std::optional<PipelineWatch> watch_;
};

}  // namespace train70b
