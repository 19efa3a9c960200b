#pragma once
// The tables of chapter 06: memory against sequence length, who computes how much, what is sent, and what rounding
// does.
#include "02_data_parallel/runtime/program.h"
#include "06_context_parallel/complete/context_parallel.h"
#include "06_context_parallel/complete/gather_attention.h"

namespace train70b {

struct ContextRun {
    std::string algorithm;
    ContextLayout layout;
    int64_t seq_len = 0;
    MemoryPeak peak;                   // of a step, this rank
    int64_t activations_formula = 0;   // chapter 01's for seq_len, divided by N
    GatherMemory gather_formula;       // of gather: comm and workspace
    std::vector<double> flops, cpu_s;  // of attention, forward and backward, by rank: counted; seconds of CPU time
    ContextTraffic sent, formula;      // of a block
    double step_s = 0, waiting_s = 0;
};
// Trains a fresh model for two steps of one micro-batch of options.micro_batch sequences, and reports the second.
// Collective over the context-parallel ranks.
ContextRun run_context(const TrainOptions& options, const Dataset& data, const Comm& ranks,
                       const ContextParallelOptions& context_options);

// Relative error of attention's output and of the gradients of q, k, v (the worst of the four), against one device in
// fp32 on the same inputs, which are rounded to dtype. Scores have a standard deviation of scale^2. Collective.
double attention_error(const Comm& ranks, const ContextParallelOptions& options, DType dtype, uint64_t seed,
                       float scale = 1);

Table work_table(const std::vector<ContextRun>& runs);
// With documents: the pairs of query and key that each rank counted, and what the layouts would do without documents.
Table document_table(const std::vector<ContextRun>& runs, const TrainOptions& options);
Table traffic_table(const std::vector<ContextRun>& runs);
Table memory_table(const std::vector<ContextRun>& runs);
Table error_table(const Comm& world);  // collective

void say_layout(const Program& program, const std::string& algorithm, const ContextLayout& layout);
// Releases the run first: the tables train models of their own, with every algorithm. chosen: its group sizes are the
// run's.
void print_tables(Program& program, const Comm& ranks, const ContextParallelOptions& chosen);

}  // namespace train70b
