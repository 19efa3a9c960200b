#pragma once
// The tables of chapter 05: what a schedule promises, what the simulator makes of measured times, and what a run shows.
#include "02_data_parallel/runtime/program.h"
#include "05_pipeline/pipeline.h"

namespace train70b {

// Every schedule on 2, 4 and 8 stages with equal stages: bubble by formula and by simulation, micro-batches in flight.
std::string promise_table();

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
std::string measured_table(const std::vector<PipelineRun>& runs);
std::string gantt_text(const PipelineRun& run);  // the measured under the simulated
// For draw.py and for Perfetto: with equal stages, from measured times, and as measured.
std::vector<std::pair<std::string, Timeline>> timelines(const PipelineRun& run);

// 1F1B in which every send waits until it is received, on two ranks: it stands still, and the watchdog says where.
void toy_deadlock(const Comm& world, Device device);

class PipelineReport {
  public:
    void add_flags(CommandLine& flags);             // --draw, --pipeline-trace
    void open(const Program& program, int64_t pp);  // the files; usage errors
    void print(Program& program, const Comm& stages, const PipelineOptions& chosen, int64_t micro_batches);

  private:
    std::string draw_, trace_, python_;
    std::optional<OutputFile> draw_file_, trace_file_;
};

}  // namespace train70b
