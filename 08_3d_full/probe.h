#pragma once
// Finds slow ranks and links before a long run: times a small matrix product on every rank and one message along every
// axis of the mesh, and names the slowest rank if it is an outlier.
#include "02_data_parallel/runtime/launch.h"
#include "08_3d_full/config.h"

namespace train70b {

// TFLOP/s of a product, GB/s along each axis, by rank: least, median, most, and the outlier, if one is below 80% of the
// median. Collective over the world.
Table probe(const Comm& world, const ParallelConfig& config, Device device, DType dtype);

void add_probe_flag(Flags& flags, bool& probes);         // --probe
void check_probe(bool probes, const CommOptions& comm);  // usage error with simulated ranks

}  // namespace train70b
