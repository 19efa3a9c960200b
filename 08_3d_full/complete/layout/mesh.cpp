#include "08_3d_full/complete/layout/mesh.h"

#include "01_single_gpu/core/check.h"

namespace train70b {

int64_t Mesh::rank(const Coordinates& at) const {
    // tag::lab-mesh-groups-rank[]
    return ((at.pp * dp + at.dp) * cp + at.cp) * tp + at.tp;
    // end::lab-mesh-groups-rank[]
}

Mesh::Coordinates Mesh::coordinate(int64_t rank) const {
    // tag::lab-mesh-groups-coordinate[]
    return {rank % tp, rank / tp % cp, rank / (tp * cp) % dp, rank / (tp * cp * dp)};
    // end::lab-mesh-groups-coordinate[]
}

std::string Mesh::text() const {
    return fmt::format("tp {} x cp {} x dp {} x pp {}{}", tp, cp, dp, pp, ep > 1 ? fmt::format(", ep {}", ep) : "");
}

Mesh mesh_of(const Mesh& asked, int64_t ranks) {
    Mesh mesh = asked;
    for (const auto& [flag, size] :
         {std::pair("--tp", asked.tp), {"--cp", asked.cp}, {"--dp", asked.dp}, {"--pp", asked.pp}})
        if (size > ranks)
            usage_error("{} {}: there are {} ranks (try at most {}, or mpirun -np {})", flag, size, ranks, ranks, size);
    const int64_t copy = asked.tp * asked.cp * asked.pp;  // ranks per model copy
    if (asked.dp == 0) {
        if (ranks % copy != 0)
            usage_error("{} ranks are not divisible by --tp {} x --cp {} x --pp {} = {} (try mpirun -np {})", ranks,
                        asked.tp, asked.cp, asked.pp, copy, (ranks / copy + 1) * copy);
        mesh.dp = ranks / copy;
    } else if (copy * asked.dp != ranks) {
        const std::string or_dp = ranks % copy == 0 ? fmt::format(", or --dp {}", ranks / copy) : "";
        usage_error("--tp {} x --cp {} x --dp {} x --pp {} = {} ranks, but there are {} (try mpirun -np {}{})",
                    asked.tp, asked.cp, asked.dp, asked.pp, copy * asked.dp, ranks, copy * asked.dp, or_dp);
    }
    return mesh;
}

MeshColors group_colors(const Mesh& mesh) {
    // tag::lab-mesh-groups-split[]
    // `color` sets the coordinates along the group's axes to 0: the ranks that agree in the others form a group.
    const auto along = [&](const std::function<void(Mesh::Coordinates&)>& color) {
        return [mesh, color](int rank) {
            Mesh::Coordinates at = mesh.coordinate(rank);
            color(at);
            return int(mesh.rank(at));
        };
    };
    return {along([](Mesh::Coordinates& at) { at.tp = 0; }), along([](Mesh::Coordinates& at) { at.cp = 0; }),
            along([](Mesh::Coordinates& at) { at.dp = at.cp = 0; }), along([](Mesh::Coordinates& at) { at.pp = 0; })};
    // end::lab-mesh-groups-split[]
}

EpColors ep_colors(const Mesh& mesh) {
    return {[mesh](int rank) { return int(rank / mesh.ep); },
            [mesh](int rank) { return int(rank / mesh.stage_ranks() * mesh.ep + rank % mesh.ep); }};
}

std::string to_string(const Mesh& mesh) {
    constexpr int64_t kMaxRows = 64;  // of a larger mesh, the first and the last rows
    std::string text = fmt::format("{}: {} ranks; one row per tensor-parallel group\n", mesh.text(), mesh.size());
    const int64_t rows = mesh.pp * mesh.dp * mesh.cp;
    const auto width = std::to_string(mesh.size() - 1).size() + 1;
    for (int64_t row = 0; row < rows; ++row) {
        if (rows > kMaxRows && row == kMaxRows / 2) {
            text += "  ...\n";
            row = rows - kMaxRows / 2;
        }
        const Mesh::Coordinates first = mesh.coordinate(row * mesh.tp);
        text += fmt::format("  stage {:<3} dp {:<4}", first.pp, first.dp);
        if (mesh.cp > 1) text += fmt::format("cp {:<4}", first.cp);
        text += "|";
        for (int64_t t = 0; t < mesh.tp; ++t) text += fmt::format("{:>{}}", row * mesh.tp + t, width);
        text += "\n";
    }
    return text;
}

}  // namespace train70b
