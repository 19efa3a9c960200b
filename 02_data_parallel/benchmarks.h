#pragma once
// The two tables of chapter 02, measured: all-reduce algorithms over message sizes, and data parallelism's three forms.
#include "02_data_parallel/data_parallel.h"

namespace train70b {

// Definitions of nccl-tests: algorithm bandwidth = bytes of x / time; bus bandwidth = that times 2 (N-1)/N, the rate at
// which each rank's link carries data where as little as possible is sent. The time is that of the slowest rank, the
// median of alternating rounds; "x library": the median of the rounds' ratios to the library's own all-reduce.
// Every algorithm's result is checked before it is timed.
struct AllReduceTime {
    int64_t bytes;
    AllReduce algorithm;
    double seconds, ratio;  // ratio: to the library
};
std::vector<AllReduceTime> time_all_reduce(const Comm& ranks, Device device, const std::vector<int64_t>& sizes);
std::string all_reduce_table(const std::vector<AllReduceTime>& times, int ranks);
std::string all_reduce_csv(const std::vector<AllReduceTime>& times, int ranks);

// Steps without an update: forward, backward, reduction. Per step; waiting: what this rank's own work stood still for.
struct DataParallelTime {
    std::string form;
    double bucket_mb, step_s, waiting_s;
    int64_t bytes, collectives;
};
std::vector<DataParallelTime> time_data_parallel(const Comm& ranks, Llama& model, Trainer& trainer,
                                                 DataParallel& data_parallel, const DataParallelOptions& options);
std::string data_parallel_table(const std::vector<DataParallelTime>& times);
std::string data_parallel_csv(const std::vector<DataParallelTime>& times, int ranks);

}  // namespace train70b
