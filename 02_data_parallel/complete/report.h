#pragma once
// What chapter 02 prints and writes around its training run: memory, all-reduce algorithms by message size, and the
// three forms of data parallelism.
#include "02_data_parallel/complete/data_parallel.h"
#include "02_data_parallel/runtime/program.h"

namespace train70b {

// Times every all-reduce algorithm; its result is checked first. Definitions of nccl-tests: algorithm bandwidth = bytes
// of x / time; bus bandwidth = algorithm bandwidth x 2 (N-1)/N, the rate on each rank's link if only the minimum number
// of bytes is sent. The time is that of the slowest rank, the median of alternating rounds; "x library" is the median
// of each round's ratio to the library's own all-reduce. Collective.
Table all_reduce_table(const Comm& ranks, Device device, const std::vector<int64_t>& sizes);

// Goes on training after step `steps_done` in each form; waiting: seconds in which this rank waits for communication.
// Collective.
Table data_parallel_table(const Comm& ranks, Trainer& trainer, DataParallel& store, const DataParallelOptions& options,
                          int64_t steps_done);

void say_layout(const Program& program, const DataParallel& store);  // after allocate()

class DataParallelReport {
  public:
    explicit DataParallelReport(CommandLine& flags);  // adds --all-reduce-csv, --modes-csv, --all-reduce-mb
    void open(const Program& program);                // the files; usage errors
    // The memory of this rank and, on several ranks, the two tables.
    void print(Program& program, const Comm& ranks, DataParallel& store, const DataParallelOptions& options);

  private:
    OptionalOutput all_reduce_{"--all-reduce-csv"}, modes_{"--modes-csv"};
    int64_t largest_mb_ = 64;
};

}  // namespace train70b
