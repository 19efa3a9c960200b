#pragma once
// --simulate CLUSTER.json: one step in time, from a dry run, on a cluster that one does not have.
#include "01_single_gpu/complete/report/table.h"
#include "02_data_parallel/runtime/program.h"
#include "08_3d_full/complete/layout/config.h"
#include "08_3d_full/plan/simulate.h"

namespace train70b {

struct SimulateOptions {
    std::string cluster_file, device_csv;
    std::string slow, slow_network;  // "3:1.2,7:2": ranks whose ops, nodes whose links are so many times slower
    SimulationOptions simulation;
    ClusterModel cluster;             // of the files
    OptionalOutput trace{"--trace"};  // of the simulated step

    bool asked() const { return !cluster_file.empty(); }
};
// And --dry-run.
void add_simulate_flags(CommandLine& flags, TrainOptions& options, SimulateOptions& simulate);
// After connect(): reads the files. --simulate implies --dry-run, and --trace is its timeline. Usage error for flags
// that need --simulate, for ranks that are not simulated, for a cluster with fewer devices, and for FP8 on one without.
void check_simulate(SimulateOptions& simulate, const ParallelConfig& config, Program& program);

// ---- what a simulated step says to a reader: where its time goes, as tables, and as a timeline ----

// What a step computes, over all ranks.
struct StepWork {
    double tokens = 0, flops = 0;  // flops: of the model (flops_per_token), no recomputation
    DType dtype = DType::bf16;     // whose peak MFU refers to; FP8 runs: bf16
};

double tokens_per_s_per_gpu(const SimulatedStep& step, const StepWork& work, int64_t ranks);
double mfu(const SimulatedStep& step, const StepWork& work, const ClusterModel& cluster, int64_t ranks);

// Computation, exposed communication and waiting by axis; below it tokens per second, MFU, the peak of memory.
Table step_table(const SimulatedStep& step, const Recording& recording, const ClusterModel& cluster,
                 const StepWork& work);

// Simulates the recorded step, prints its tables, writes the trace: of --fake-rank if it is given, else of the first
// rank of every pipeline stage.
void print_simulation(const Program& program, const ParallelConfig& config, SimulateOptions& simulate,
                      const Recording& recording);

}  // namespace train70b
