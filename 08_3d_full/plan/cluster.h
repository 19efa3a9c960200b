#pragma once
// The cluster that a step is simulated on. Chapter 04 owns the file's format, because it estimates with the same links.
#include "04_tensor_parallel/cluster.h"

namespace train70b {

// The file that --simulate and --cluster mean: a path, or the name of one in 08_3d_full/clusters, with or without
// ".json". The name itself if there is none.
std::string cluster_path(const std::string& name);

}  // namespace train70b
