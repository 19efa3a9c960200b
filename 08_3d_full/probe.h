#pragma once
// Finds slow ranks and links before a long run: times a small matrix product on every rank and one message along every
// axis of the mesh, and names the slowest rank if it is an outlier.
#include "02_data_parallel/runtime/launch.h"
#include "08_3d_full/config.h"

namespace train70b {

// Returns a table on rank 0 (empty on the others): TFLOP/s of a product and GB/s along each axis: minimum, median and
// maximum over the ranks, and the slowest rank if it is below 80% of the median. Collective over the world.
std::string probe(const Comm& world, const ParallelConfig& config, Device device, DType dtype);

void add_probe_flag(Flags& flags, bool& probes);         // --probe
void check_probe(bool probes, const CommOptions& comm);  // usage error with simulated ranks

}  // namespace train70b
