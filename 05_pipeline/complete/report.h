#pragma once
// The tables of chapter 05: what a schedule promises, what the simulator makes of measured times, and what a run shows.
#include "02_data_parallel/runtime/program.h"
#include "05_pipeline/complete/pipeline.h"

namespace train70b {

// Every schedule on 2, 4 and 8 stages with equal stages: bubble by formula and by simulation, micro-batches in flight.
Table promise_table();

struct PipelineRun {
    Schedule schedule;
    Timeline measured, simulated;    // the latter from the former's medians of F, B, I and W, and the hop
    double hop = 0;                  // seconds: half a round trip of a stage's output between ranks 0 and 1
    std::vector<MemoryPeak> memory;  // of a step, by rank
    std::vector<int64_t> in_flight;  // by rank
    int64_t wire_bytes = 0;          // sent by rank 0 in a step
};
// Trains this stage of a fresh model for five steps of m micro-batches of options.micro_batch sequences, and reports
// the quickest after the first. Collective over the stages.
PipelineRun run_pipeline(const TrainOptions& options, const Dataset& data, const Comm& stages,
                         const PipelineOptions& pipeline_options, int64_t micro_batches);
Table measured_table(const std::vector<PipelineRun>& runs);
std::string gantt_text(const PipelineRun& run);  // the measured under the simulated
// For draw.py and for Perfetto: with equal stages, from measured times, and as measured.
std::vector<std::pair<std::string, Timeline>> timelines(const PipelineRun& run);

// 1F1B in which every send waits until it is received, on two ranks: it hangs, and the watchdog says where.
void toy_deadlock(const Comm& world, Device device);

// Of this run: its schedule, and the layers of this rank.
Schedule schedule_of(const Program& program, int64_t pp, const PipelineOptions& options);
Stage stage_of(const Program& program, int64_t pp, const PipelineOptions& options);
void say_layout(const Program& program, int64_t pp, const PipelineOptions& options);

class PipelineReport {
  public:
    explicit PipelineReport(CommandLine& flags);      // adds --draw, --pipeline-trace, --toy-deadlock
    bool toy_deadlock(const Program& program) const;  // whether it was asked for; then it has run
    // Checks that the stages and the schedule are possible, then opens the files; usage errors.
    void open(const Program& program, int64_t pp, const PipelineOptions& options);
    // Releases the run first: the tables train models of their own.
    void print(Program& program, const Comm& stages, const PipelineOptions& chosen);

  private:
    OptionalOutput draw_{"--draw"}, trace_{"--pipeline-trace"};
    std::string python_;
    bool toy_ = false;
};

}  // namespace train70b
