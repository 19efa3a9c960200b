#pragma once
// What checkpoints of a run cost, by formula: bytes, seconds, and how often to write one.
//
//     Lost time per time between failures M: C M / t for checkpoints of cost C every t seconds, and t / 2 of work done
//     again. The sum is least at  t = sqrt(2 C M)  (Young 1974; Daly 2006 has the next terms), and is  sqrt(2 C / M).
//     Asynchronous: C is the copy only, but the newest complete checkpoint is older by the time of writing.
#include "01_single_gpu/complete/report/table.h"
#include "08_3d_full/complete/layout/config.h"

namespace train70b {

struct CheckpointCost {
    double bytes_per_parameter = 0;  // weight and moments as the optimizer keeps them
    int64_t bytes = 0;               // of a full checkpoint, without the files' headers
    int64_t nodes = 1;               // of kRanksPerNode ranks
    double write_s = 0, copy_s = 0;  // at kNodeWriteRate; of the largest rank's part at kCopyRate
};
constexpr int64_t kRanksPerNode = 8;
constexpr double kNodeWriteRate = 2e9;  // bytes/s of one node to a shared file system
constexpr double kCopyRate = 25e9;      // bytes/s from a GPU to the host: PCIe 4 x16, and half of PCIe 5

CheckpointCost checkpoint_cost(const TrainOptions& options, const ParallelConfig& config);
Table checkpoint_table(const CheckpointCost& cost);

}  // namespace train70b
