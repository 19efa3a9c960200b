#pragma once
// The two measured tables of chapter 02: all-reduce algorithms by message size, and the three forms of data
// parallelism.
#include "02_data_parallel/data_parallel.h"
#include "02_data_parallel/runtime/measure.h"

namespace train70b {

// Definitions of nccl-tests: algorithm bandwidth = bytes of x / time; bus bandwidth = algorithm bandwidth x 2 (N-1)/N,
// the rate on each rank's link if only the minimum number of bytes is sent. The time is that of the slowest rank, the
// median of alternating rounds; "x library" is the median of each round's ratio to the library's own all-reduce. Every
// algorithm's result is checked before it is timed.
struct AllReduceTime {
    int64_t bytes;
    std::string algorithm;  // a name of all_reduce.h
    double seconds, ratio;  // ratio: to the library
};
std::vector<AllReduceTime> time_all_reduce(const Comm& ranks, Device device, const std::vector<int64_t>& sizes);
std::string all_reduce_table(const std::vector<AllReduceTime>& times, int ranks);
std::string all_reduce_csv(const std::vector<AllReduceTime>& times, int ranks);

// Training steps on two ranks or more, per step; waiting: seconds in which this rank waits for communication.
struct DataParallelTime {
    std::string form;
    double bucket_mb, step_s, waiting_s;
    int64_t bytes, collectives;
};
// Goes on training behind step `steps_done`.
std::vector<DataParallelTime> time_data_parallel(const Comm& ranks, Trainer& trainer, DataParallel& store,
                                                 const DataParallelOptions& options, int64_t steps_done);
std::string data_parallel_table(const std::vector<DataParallelTime>& times);
std::string data_parallel_csv(const std::vector<DataParallelTime>& times, int ranks);

}  // namespace train70b
