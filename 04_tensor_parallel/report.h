#pragma once
// The tables of chapter 04: what a rank keeps and sends, measured and computed; and what a link makes of it, estimated.
#include "02_data_parallel/runtime/program.h"
#include "04_tensor_parallel/cluster.h"
#include "04_tensor_parallel/traffic.h"

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

// What the links between ranks make of tensor parallelism: an estimate, no measurement.
std::vector<ClusterModel::Link> links_of(const ClusterModel& cluster);  // those that it has: NVLink, host, network
// Of a block: computation / (computation + communication), nothing overlapped.
double efficiency(const LlamaConfig& config, int64_t seq_len, int64_t tp, double flops_per_s,
                  const ClusterModel::Link& link);

// Of 8b, 70b and 405b: a row per model and tp, a column per link.
Table efficiency_table(const ClusterModel& cluster);
Table efficiency_rows(const ClusterModel& cluster);  // the same, a row per link as well: for CSV

void say_layout(const Program& program, int64_t tp, const TensorParallelOptions& options);

class TensorParallelReport {
  public:
    explicit TensorParallelReport(CommandLine& flags);  // adds --links, --efficiency-csv
    void open(const Program& program);                  // the files; usage errors
    void print(Program& program, int64_t tp);           // releases the run first: the tables train models of their own

  private:
    std::string links_path_;
    ClusterModel links_;
    OptionalOutput efficiency_{"--efficiency-csv"};
};

}  // namespace train70b
