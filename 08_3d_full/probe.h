#pragma once
// Before a long run: is every rank as fast as the others, and every link? A small matrix product per rank and one
// message per axis of the mesh, timed; the slowest is named if it stands out.
#include "08_3d_full/compose.h"

namespace train70b {

// A table on rank 0 (empty on the others): TFLOP/s of a product, GB/s along each axis, by rank: least, median, most,
// and the outlier, if one is below 80% of the median. Collective over the world.
std::string probe(const Comm& world, const Plan& plan, Device device, DType dtype);

}  // namespace train70b
