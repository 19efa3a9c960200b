#pragma once
// The communicators of the mesh.
#include "02_data_parallel/comm.h"
#include "08_3d_full/complete/layout/mesh.h"

namespace train70b {

// This rank's groups along each axis of the mesh (group_colors).
struct MeshComms {
    Comm tp, cp, dp_cp, pp;
    Comm ep, edp;          // of one rank without over_ep
    bool own_edp = false;  // edp has other ranks than dp_cp
};
MeshComms split(const Comm& world, const Mesh& mesh, bool over_ep = false);

}  // namespace train70b
