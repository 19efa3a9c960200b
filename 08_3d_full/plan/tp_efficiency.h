#pragma once
// What the links between ranks leave of tensor parallelism: an estimate, nothing overlapped.
#include "01_single_gpu/complete/report/table.h"
#include "08_3d_full/complete/layout/cluster.h"

namespace train70b {

// Of 8b, 70b and 405b on 2 to 16 ranks, over the links that the cluster has (NVLink, host, network). Usage error, which
// begins with `where`, without a link.
struct TpEfficiency {
    Table text;  // a row per model and tp, a column per link
    Table csv;   // a row per model, tp and link
};
TpEfficiency tp_efficiency_tables(const ClusterModel& cluster, const std::string& where);

}  // namespace train70b
