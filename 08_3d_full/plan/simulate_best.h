#pragma once
// The planner's last step: a candidate's dry run is recorded and simulated on the cluster.
#include "01_single_gpu/complete/flags/options.h"
#include "08_3d_full/plan/explain.h"
#include "08_3d_full/plan/simulate.h"

namespace train70b {

class Dataset;

// One step of the layout, recorded and simulated; its memory is that of the recording's largest rank. With more than
// `limit` bytes it is only recorded. data: any text that is longer than a sequence; a dry run looks at no token.
Prediction simulated(const PlanRequest& request, const ClusterModel& cluster, const Dataset& data,
                     const Candidate& candidate, double limit = std::numeric_limits<double>::infinity());
// All of them in so many processes (the ledger of a recording is a process's own); in the order of the candidates.
std::vector<Prediction> simulated(const PlanRequest& request, const ClusterModel& cluster, const Dataset& data,
                                  const std::vector<Candidate>& candidates, double limit, int64_t processes,
                                  const OnProgress& progress);
// What is recorded: the options of chapter 08 for this layout.
TrainOptions options_of(const PlanRequest& request, const Layout& layout);

}  // namespace train70b
