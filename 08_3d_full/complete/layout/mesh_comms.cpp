#include "08_3d_full/complete/layout/mesh_comms.h"

namespace train70b {

MeshComms split(const Comm& world, const Mesh& mesh, bool over_ep) {
    const MeshColors colors = group_colors(mesh);
    MeshComms comms{world.split(colors.tp, "tp"),
                    world.split(colors.cp, "cp", GroupLoad::light),
                    world.split(colors.dp_cp, mesh.cp > 1 ? "dp_cp" : "dp"),
                    world.split(colors.pp, "pp", GroupLoad::light),
                    Comm(),
                    Comm()};
    comms.own_edp = over_ep && (mesh.ep > 1 || mesh.tp > 1);
    if (!over_ep) return comms;
    const auto [ep, edp] = ep_colors(mesh);
    if (mesh.ep > 1) comms.ep = world.split(ep, "ep");
    comms.edp = comms.own_edp ? world.split(edp, "edp") : comms.dp_cp;
    return comms;
}

}  // namespace train70b
