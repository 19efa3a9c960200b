#pragma once
// --simulate CLUSTER.json: one step in time, from a dry run, on a cluster that one does not have.
#include "02_data_parallel/runtime/program.h"
#include "08_3d_full/config.h"
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
void add_simulate_flags(CommandLine& flags, SimulateOptions& simulate);
// After connect(): reads the files. --simulate implies --dry-run, and --trace is its timeline. Usage error for flags
// that need --simulate, for ranks that are not simulated, for a cluster with fewer devices, and for FP8 on one without.
void check_simulate(SimulateOptions& simulate, const ParallelConfig& config, Program& program);

// Simulates the recorded step, prints its tables, writes the trace: of --fake-rank if it is given, else of the first
// rank of every pipeline stage.
void print_simulation(const Program& program, const ParallelConfig& config, SimulateOptions& simulate,
                      const Recording& recording);

}  // namespace train70b
