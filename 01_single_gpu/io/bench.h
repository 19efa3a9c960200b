#pragma once
// --bench: what the device can do, how long a training step takes, and how each of its ops stands against its floor.
#include "01_single_gpu/training_run.h"

namespace train70b {

// Median seconds of one call of body, of `calls` after one that does not count; each is waited for.
double median_seconds(Device device, int calls, const std::function<void()>& body);

// Ceilings measured in this very run, so that a table is comparable with itself on any machine.
struct Ceilings {
    double copy_bytes_per_s;     // reading and writing a large array, both counted
    double product_flops_per_s;  // a large square matrix product in the model's dtype
};
Ceilings measure_ceilings(Device device, DType dtype);

// Trains a few steps without watching (their median is the step time), then a few with every op timed by itself. Prints
// a table; with csv_path also writes it as CSV: op, calls, ms, floor_ms, share, gflops, gbytes_per_s. An op's floor is
// the larger of its bytes over the copy bandwidth and its FLOPs over the product rate.
void bench(const TrainOptions& options, TrainingRun& run, const std::string& csv_path);

}  // namespace train70b
