#pragma once
// The mesh: every rank has coordinates on four axes. A group is the ranks that differ along one axis only.
//
//     tp   divides each layer       several collectives per layer, on the critical path: inside a node
//     cp   divides each sequence    keys and values once per layer
//     dp   divides the batch        gradients once per step
//     pp   divides the layers       activations between adjacent stages: the slowest links suffice
//
// Experts (experts/README.md) are divided over an axis that is folded over tp, cp and dp:
//
//     ep    divides the experts of a layer      rows to the ranks of their experts, and back: all-to-all
//     edp   its remainder: ranks with the same experts
//
// Ranks are numbered in that order, tp fastest, as in Megatron (Narayanan et al. 2021, section 3): adjacent ranks,
// which share the fastest links, communicate most.
#include <cstdint>
#include <functional>
#include <string>

namespace train70b {

struct Mesh {
    int64_t tp = 1, cp = 1, dp = 1, pp = 1;
    int64_t ep = 1;  // consecutive ranks of a stage's tp x cp x dp

    struct Coordinates {
        int64_t tp, cp, dp, pp;
        bool operator==(const Coordinates&) const = default;
    };
    constexpr int64_t size() const { return stage_ranks() * pp; }
    constexpr int64_t stage_ranks() const { return tp * cp * dp; }
    constexpr int64_t edp() const { return stage_ranks() / ep; }
    int64_t rank(const Coordinates& at) const;
    Coordinates coordinate(int64_t rank) const;  // the inverse
    std::string text() const;                    // "tp 2 x cp 1 x dp 2 x pp 2"; ", ep 4" if it is above 1
};

// dp 0: computes it from the number of ranks. Usage error, saying what would work, if the product of the axes is not
// the number of ranks.
Mesh mesh_of(const Mesh& asked, int64_t ranks);

// The groups as functions of the rank: ranks of one color form a group. Gradient sums and ZeRO use dp_cp, because
// context-parallel ranks hold the same parameters.
struct MeshColors {
    std::function<int(int rank)> tp, cp, dp_cp, pp;
};
MeshColors group_colors(const Mesh& mesh);
struct EpColors {
    std::function<int(int rank)> ep, edp;
};
EpColors ep_colors(const Mesh& mesh);

// A picture of the mesh: one row per tensor-parallel group.
std::string to_string(const Mesh& mesh);

}  // namespace train70b
