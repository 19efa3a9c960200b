#pragma once
#include "02_data_parallel/comm.h"
#include "08_3d_full/mesh.h"

namespace train70b {

// This rank's groups along each axis of the mesh (group_colors).
struct MeshComms {
    Comm tp, cp, dp_cp, pp;
};
MeshComms split(const Comm& world, const Mesh& mesh);

}  // namespace train70b
