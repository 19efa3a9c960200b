#pragma once
// The mesh: every rank has a coordinate on each of four axes, and works with the ranks that differ from it along one of them.
//
//     tp   layers are divided      several times per layer, all ranks wait: inside a node
//     cp   sequences are divided   keys and values once per layer
//     dp   the batch is divided    gradients once per step
//     pp   the layers are dealt    activations between neighbours: the slowest links will do
//
// Ranks are numbered in that order, tp fastest (Megatron's; Narayanan et al. 2021, section 3): neighbours in number,
// who are neighbours in hardware, are those that talk most.
#include "02_data_parallel/comm.h"

namespace train70b {

struct Mesh {
    int64_t tp = 1, cp = 1, dp = 1, pp = 1;

    struct Coordinates {
        int64_t tp, cp, dp, pp;
        bool operator==(const Coordinates&) const = default;
    };
    constexpr int64_t size() const { return tp * cp * dp * pp; }
    constexpr int64_t rank(const Coordinates& at) const { return ((at.pp * dp + at.dp) * cp + at.cp) * tp + at.tp; }
    constexpr Coordinates coordinate(int64_t rank) const {
        return {rank % tp, rank / tp % cp, rank / (tp * cp) % dp, rank / (tp * cp * dp)};
    }
    std::string text() const;  // "tp 2 x cp 1 x dp 2 x pp 2"
};
static_assert(Mesh{.tp = 4, .cp = 1, .dp = 2, .pp = 2}.rank({3, 0, 1, 0}) == 7);
static_assert(Mesh{.tp = 4, .cp = 1, .dp = 2, .pp = 2}.coordinate(7) == Mesh::Coordinates{3, 0, 1, 0});

// With dp 0: what the others leave of the ranks. Usage error that says what would work, where the product is not the
// number of ranks.
Mesh mesh_of(const Mesh& asked, int64_t ranks);

// This rank's groups. Gradients are summed, and ZeRO shards, over dp_cp: context ranks hold the same parameters.
struct MeshComms {
    Comm tp, cp, dp_cp, pp;
};
MeshComms split(const Comm& world, const Mesh& mesh);

// Which rank has which coordinates: a row per model copy's tensor-parallel ranks.
std::string to_string(const Mesh& mesh);

}  // namespace train70b
