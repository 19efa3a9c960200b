#include "08_3d_full/mesh_comms.h"

namespace train70b {

MeshComms split(const Comm& world, const Mesh& mesh) {
    const MeshColors colors = group_colors(mesh);
    return {world.split(colors.tp, "tp"), world.split(colors.cp, "cp"),
            world.split(colors.dp_cp, mesh.cp > 1 ? "dp_cp" : "dp"), world.split(colors.pp, "pp")};
}

}  // namespace train70b
