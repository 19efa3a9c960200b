// Grades the lab mesh-groups.
#include <set>
#include <sstream>

#include "08_3d_full/complete/compose.h"
#include "tests/labs.h"
#include "tests/ranks.h"

using namespace train70b;
using namespace train70b::test;

namespace {

using Coordinates = Mesh::Coordinates;
constexpr Mesh kMesh{.tp = 2, .cp = 3, .dp = 4, .pp = 5};

std::string text_of(const Coordinates& at) {
    return fmt::format("(tp {}, cp {}, dp {}, pp {})", at.tp, at.cp, at.dp, at.pp);
}
std::string text_of(const std::vector<double>& ranks) {
    std::string text;
    for (const double rank : ranks) text += fmt::format("{}{}", text.empty() ? "" : " ", rank);
    return text;
}

// Every way in which two axes of 2 make four ranks.
std::vector<Mesh> meshes_of_four() {
    return {{2, 2, 1, 1}, {2, 1, 2, 1}, {2, 1, 1, 2}, {1, 2, 2, 1}, {1, 2, 1, 2}, {1, 1, 2, 2}};
}

// This rank's group of `groups`, against the ranks whose coordinates `same` finds to be of the same group.
std::string compare(const Mesh& mesh, const char* name, const Comm& group,
                    const std::function<bool(const Coordinates&, const Coordinates&)>& same) {
    const std::vector<double> got = group.gather({double(world().rank())});
    std::vector<double> expected;
    for (int64_t rank = 0; rank < mesh.size(); ++rank)
        if (same(mesh.coordinate(world().rank()), mesh.coordinate(rank))) expected.push_back(double(rank));
    if (got == expected) return "";
    return fmt::format("{}: the {} group of rank {} is {}, expected {}", mesh.text(), name, world().rank(),
                       text_of(got), text_of(expected));
}

void agree(const std::string& wrong) {
    Failures failures;
    failures.expect(wrong.empty(), wrong);
    const std::string all = failures.of_all_ranks();
    const size_t begin = all.find("tp ");
    expect_none_wrong(all.empty() ? "" : all.substr(begin, all.find('\n', begin) - begin));
}

}  // namespace

TEST_CASE("lab: rank and coordinate") {
    std::set<std::string> seen;
    for (int64_t rank = 0; rank < kMesh.size(); ++rank) {
        const Coordinates at = kMesh.coordinate(rank);
        const std::string where = fmt::format("{}: rank {} is at {}", kMesh.text(), rank, text_of(at));
        if (!(at.tp >= 0 && at.tp < kMesh.tp && at.cp >= 0 && at.cp < kMesh.cp && at.dp >= 0 && at.dp < kMesh.dp &&
              at.pp >= 0 && at.pp < kMesh.pp))
            return expect_none_wrong(where + ", outside of the mesh");
        if (!seen.insert(text_of(at)).second) return expect_none_wrong(where + ", and so is another one");
        if (kMesh.rank(at) != rank)
            return expect_none_wrong(fmt::format("{}, where rank() finds {}", where, kMesh.rank(at)));
    }
    figure("ranks with coordinates of their own", int64_t(seen.size()), kMesh.tp * kMesh.cp * kMesh.dp * kMesh.pp, "",
           "tp cp dp pp");
}

TEST_CASE("lab: neighbours along each axis") {
    const std::string own = "tp cp dp pp", order = drawn("LAB_ORDER", own);
    const bool pp_first = kMesh.rank({0, 0, 0, 1}) == 1, dp_before_cp = kMesh.rank({0, 0, 1, 0}) == kMesh.tp;
    const std::string remark = order != own ? "Your seed's order, from the fastest: " + order + "."
                               : pp_first   ? "Your stages are adjacent ranks: pp communicates least and comes last."
                               : dp_before_cp
                                   ? "You number dp before cp: cp communicates in every layer, dp once per step."
                                   : "";
    std::istringstream axes(order);
    std::string axis, formula = "1";
    for (int64_t expected = 1; axes >> axis;) {
        Coordinates at{0, 0, 0, 0};
        (axis == "tp" ? at.tp : axis == "cp" ? at.cp : axis == "dp" ? at.dp : at.pp) = 1;
        figure(fmt::format("from a rank to its neighbour along {}", axis), kMesh.rank(at) - kMesh.rank({0, 0, 0, 0}),
               expected, "", formula, remark);
        expected *= at.tp ? kMesh.tp : at.cp ? kMesh.cp : at.dp ? kMesh.dp : kMesh.pp;
        formula = formula == "1" ? axis : formula + " " + axis;
    }
}

TEST_CASE("lab: nodes that a tensor-parallel group spans") {
    const Mesh mesh{.tp = 8, .cp = 2, .dp = 2, .pp = 2};
    size_t most = 0;
    for (int64_t group = 0; group < 8; ++group) {
        std::set<int64_t> nodes;
        for (int64_t t = 0; t < 8; ++t) nodes.insert(mesh.rank({t, group % 2, group / 2 % 2, group / 4}) / 8);
        most = std::max(most, nodes.size());
    }
    figure("nodes of 8 ranks that one tp group of 8 spans", int64_t(most), int64_t(1), "", "tp / 8",
           "Its collectives, several per layer and exposed, would go over the network.");
}

TEST_CASE("lab: the members of tp, cp and pp groups") {
    std::string wrong;
    const auto keep = [&](const std::string& text) {
        if (wrong.empty()) wrong = text;
    };
    for (const Mesh& mesh : meshes_of_four()) {
        const MeshComms groups = split(world(), mesh);
        keep(compare(mesh, "tp", groups.tp, [](const Coordinates& a, const Coordinates& b) {
            return a.cp == b.cp && a.dp == b.dp && a.pp == b.pp;
        }));
        keep(compare(mesh, "cp", groups.cp, [](const Coordinates& a, const Coordinates& b) {
            return a.tp == b.tp && a.dp == b.dp && a.pp == b.pp;
        }));
        keep(compare(mesh, "pp", groups.pp, [](const Coordinates& a, const Coordinates& b) {
            return a.tp == b.tp && a.cp == b.cp && a.dp == b.dp;
        }));
        if (groups.tp.name() != "tp" || groups.cp.name() != "cp" || groups.pp.name() != "pp")
            keep(mesh.text() + ": a group of another name");
    }
    agree(wrong);
}

TEST_CASE("lab: the ranks that share parameters") {
    std::string wrong;
    for (const Mesh& mesh : meshes_of_four()) {
        const MeshComms groups = split(world(), mesh);
        const std::string text = compare(mesh, "dp_cp", groups.dp_cp, [](const Coordinates& a, const Coordinates& b) {
            return a.tp == b.tp && a.pp == b.pp;
        });
        if (wrong.empty()) wrong = text;
        const std::string name = mesh.cp > 1 ? "dp_cp" : "dp";
        if (wrong.empty() && groups.dp_cp.name() != name)
            wrong = fmt::format("{}: the group's name is {}, expected {}", mesh.text(), groups.dp_cp.name(), name);
    }
    agree(wrong);
    const MeshComms groups = split(world(), {.tp = 1, .cp = 2, .dp = 2, .pp = 1});
    const int64_t most = int64_t(world().max(groups.dp_cp.size()));
    figure("ranks over which gradients are summed, cp 2 x dp 2", most, int64_t(4), "", "dp cp",
           most == 2 ? "Context-parallel ranks hold the same parameters too: their gradients belong to the sum." : "");
    const MeshComms without_dp = split(world(), {.tp = 2, .cp = 2, .dp = 1, .pp = 1});
    const int64_t two = int64_t(world().max(without_dp.dp_cp.size()));
    figure("ranks over which gradients are summed, cp 2 x dp 1", two, int64_t(2), "", "dp cp",
           two == 1 && most == 4 ? "Without data parallelism they still do: these gradients belong to a sum over cp."
                                 : "");
}
