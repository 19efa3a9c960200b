#pragma once
// A dry run that writes down what every rank does in a step (plan/sequence.h), instead of only booking its memory.
//
// Three things keep it short. In a world of more than 64 ranks, those that differ only in the numbers of their peers
// are run once: those of one stage, one cp rank and shards of equal size. (Where a shard cuts parameters is not looked
// at. It changes the number of the update's ops, and in ZeRO-2 and 3 beside tensor parallelism how much of the norms'
// gradients a rank sums over tp, once per step.) What cp and tp change on a stage is applied to stages that do the same
// (alike_ranks.h). And few micro-batches are run, whatever the step's number: what a rank
// does in a step of the schedule depends on the step, on its neighbours in the list, and on whether it is among the
// first or last of its kind. So two numbers of micro-batches are recorded; the longer one must explain the shorter one,
// event by event, and then supplies the parts of the full schedule. Where it does not, more micro-batches are run, in
// the end all.
#include "01_single_gpu/complete/flags/options.h"
#include "08_3d_full/complete/layout/config.h"
#include "08_3d_full/plan/sequence.h"

namespace train70b {

class Dataset;

struct RecordOptions {
    int64_t most_ranks = 64;         // worlds of up to so many ranks are run rank by rank
    bool all_micro_batches = false;  // run every micro-batch
    int64_t only = -1;               // this rank alone, as if all others were equal to it; -1: all ranks
};

// Of the options' largest step. Collective operations have no peers, so it needs no MPI.
Recording record_step(const TrainOptions& options, const Dataset& data, const ParallelConfig& config,
                      const RecordOptions& how = {});
// The same, and then steps of other numbers of micro-batches, which are no work of their own; the first alone where it
// does not repeat itself.
std::vector<Recording> record_steps(const TrainOptions& options, const Dataset& data, const ParallelConfig& config,
                                    std::vector<int64_t> micro_batches, const RecordOptions& how = {});

}  // namespace train70b
