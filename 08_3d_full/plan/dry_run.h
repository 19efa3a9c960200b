#pragma once
// The dry run: the memory of any rank of any layout, by kind, next to its formula, on any machine. Tensors are meta
// tensors and collectives have no peers; everything else is the real program, so allocations are booked in the order in
// which a real rank would make them.
#include "02_data_parallel/runtime/program.h"
#include "08_3d_full/complete/layout/config.h"
#include "08_3d_full/plan/memory_formula.h"
#include "08_3d_full/plan/simulate_flag.h"

namespace train70b {

struct RankMemory : StateMemory {  // that by formula
    int64_t rank = 0;
    MemoryPeak peak;  // of a step
};

Workload workload_of(const TrainOptions& options);
// What a rank holds from one step to the next, from shapes alone: state_memory() of plan/memory_formula.h.
RankMemory rank_formula(const TrainOptions& options, const ParallelConfig& config, int64_t rank);
// One step of a rank with meta tensors. before: all roles are set and nothing is allocated; after: the step is complete
// and everything still allocated. flags: for the metrics file.
void run_meta_step(const TrainOptions& options, const nlohmann::ordered_json& flags, const Dataset& data,
                   const ParallelConfig& config, int64_t rank, const std::function<void(Trainer&)>& before,
                   const std::function<void(const Trainer&)>& after);
// The rank's memory, by formula and by such a step.
RankMemory book_rank(const TrainOptions& options, const nlohmann::ordered_json& flags, const Dataset& data,
                     const ParallelConfig& config, int64_t rank);

// Books one step of every rank, or of --fake-rank alone, and prints the tables. Files that the options name are that
// rank's. Usage error without simulated ranks. With --simulate, the step in time follows (of all ranks).
void print_dry_run(Program& program, ParallelConfig config, SimulateOptions& simulate);
// This rank's, after training. snapshot_bytes: of checkpoints, on the host.
void print_memory(Program& program, const ParallelConfig& config, int64_t snapshot_bytes);

}  // namespace train70b
