#pragma once
// What the links between ranks make of tensor parallelism: an estimate, no measurement.
#include "01_single_gpu/config.h"
#include "01_single_gpu/report/table.h"
#include "04_tensor_parallel/cluster.h"

namespace train70b {

std::vector<ClusterModel::Link> links_of(const ClusterModel& cluster);  // those that it has: NVLink, host, network
// Of a block: computation / (computation + communication), nothing overlapped.
double efficiency(const LlamaConfig& config, int64_t seq_len, int64_t tp, double flops_per_s,
                  const ClusterModel::Link& link);

// Of 8b, 70b and 405b: a row per model and tp, a column per link.
Table efficiency_table(const ClusterModel& cluster);
Table efficiency_rows(const ClusterModel& cluster);  // the same, a row per link as well: for CSV

}  // namespace train70b
