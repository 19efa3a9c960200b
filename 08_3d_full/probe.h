#pragma once
// Before a long run: is every rank as fast as the others, and every link? A small matrix product per rank and one
// message per axis of the mesh, timed; the slowest is named if it stands out.
#include "02_data_parallel/runtime/launch.h"
#include "08_3d_full/config.h"

namespace train70b {

// A table on rank 0 (empty on the others): TFLOP/s of a product, GB/s along each axis, by rank: least, median, most,
// and the outlier, if one is below 80% of the median. Collective over the world.
std::string probe(const Comm& world, const ParallelConfig& config, Device device, DType dtype);

void add_probe_flag(Flags& flags, bool& probes);         // --probe
void check_probe(bool probes, const CommOptions& comm);  // usage error where there are no links

}  // namespace train70b
