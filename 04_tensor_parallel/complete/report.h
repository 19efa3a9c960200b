#pragma once
// The tables of chapter 04: what a rank keeps and sends, measured and computed.
#include "02_data_parallel/runtime/program.h"
#include "04_tensor_parallel/complete/traffic.h"

namespace train70b {

struct TensorParallelRun {
    int64_t tp;
    TensorParallelOptions options;
    MemoryPeak peak;       // of a step, this rank
    int64_t elements = 0;  // formula: parameters it holds
    ActivationFormula activations{};
    Traffic layer, layer_formula, step, step_formula;
    double step_s = 0, waiting_s = 0;
};
// Trains a fresh model for three steps with one micro-batch of options.micro_batch sequences each, on tp ranks of world
// (the other groups of tp ranks do the same), and reports the last. Collective.
TensorParallelRun run_tensor_parallel(const TrainOptions& options, const Dataset& data, const Comm& world, int64_t tp,
                                      const TensorParallelOptions& tp_options);

Table memory_table(const std::vector<TensorParallelRun>& runs, const Llama::Options& types);
Table traffic_table(const std::vector<TensorParallelRun>& runs);
Table time_table(const std::vector<TensorParallelRun>& runs);

void say_layout(const Program& program, int64_t tp, const TensorParallelOptions& options);

// Releases the run first: the tables train models of their own. Collective.
void print_report(Program& program, int64_t tp);

}  // namespace train70b
