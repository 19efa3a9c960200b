#pragma once
// One rank of a simulated run: memory by kind against its formula, for any rank of any layout on any machine.
// The model's tensors have shapes but no memory, and collectives have no peers; everything else is the program itself,
// so that what a real rank would allocate is booked in the order in which it would.
#include "02_data_parallel/runtime/program.h"
#include "08_3d_full/config.h"

namespace train70b {

struct RankMemory {
    int64_t rank = 0;
    MemoryPeak peak;                                         // of a step
    int64_t params = 0, grads = 0, optimizer = 0, host = 0;  // by formula, bytes; -1: there is none
};

// What a rank holds, from the shapes alone: its stage's units over tp, each padded for the data ranks, and of the
// optimizer 12 bytes (fp32: 8, fp64: 16) per element that it owns.
RankMemory rank_formula(const TrainOptions& options, const ParallelConfig& config, int64_t rank);
// The same with the peak of one step, booked by running it with meta tensors. flags: for the files that options name.
RankMemory book_rank(const TrainOptions& options, const nlohmann::ordered_json& flags, const Dataset& data,
                     const ParallelConfig& config, int64_t rank);

// One rank's peak beside the formula; and all ranks, equal ones in one line, with the largest and what makes it so.
std::string rank_table(const RankMemory& memory, const TrainOptions& options);
std::string ranks_table(const std::vector<RankMemory>& ranks, const ParallelConfig& config);

void add_dry_run_flag(Flags& flags, TrainOptions& options);                // --dry-run
void check_dry_run(const TrainOptions& options, const CommOptions& comm);  // usage error without simulated ranks
// Books one step of every rank, or of --fake-rank alone, and prints the tables. Files that the options name are that rank's.
void print_dry_run(Program& program, ParallelConfig config);

}  // namespace train70b
