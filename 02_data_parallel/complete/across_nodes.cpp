#include "02_data_parallel/complete/across_nodes.h"

#include <algorithm>
#include <bit>
#include <map>

#include "01_single_gpu/ops/ops.h"

namespace train70b {
namespace {

// The ranks of each node, both in rank order.
std::vector<std::vector<int>> by_node(const std::vector<int>& nodes) {
    std::map<int, size_t> index;
    std::vector<std::vector<int>> members;
    for (int rank = 0; rank < int(nodes.size()); ++rank) {
        const auto [at, is_new] = index.try_emplace(nodes[size_t(rank)], members.size());
        if (is_new) members.emplace_back();
        members[at->second].push_back(rank);
    }
    return members;
}

// The two levels: the ranks of this one's node, and one rank of each node, the one with this one's place in it.
struct Levels {
    int M, L, m, l;  // nodes, ranks of each; this one's node, its place there
    Peers inside, across;
};

Levels levels_of(Backend& group) {
    const std::vector<std::vector<int>> members = by_node(group.nodes());
    const int M = int(members.size()), L = int(members[0].size()), m = group.rank() / L, l = group.rank() % L;
    for (int node = 0; node < M; ++node) {
        const std::vector<int>& here = members[size_t(node)];
        if (int(here.size()) != L)
            usage_error(
                "--all-reduce hierarchical: one node has {} of a group's ranks and another {}; it needs equally "
                "many (try tree)",
                L, here.size());
        if (here.front() != node * L || here.back() != (node + 1) * L - 1)
            usage_error(
                "--all-reduce hierarchical: ranks {} and {} share a node, and others are between them (try mpirun "
                "--map-by core, or tree)",
                here.front(), here.back());
    }
    std::vector<int> across;
    for (const std::vector<int>& here : members) across.push_back(here[size_t(l)]);
    return {M, L, m, l, Peers(group, members[size_t(m)]), Peers(group, across)};
}

// All ranks have equal parts of x, its segments. Room for those of the ranks with this one's place, side by side.
Tensor across_parts(Backend& group, const Levels& on, const Tensor& x) {
    const int64_t n = x.size() / group.size();
    CHECK(n * group.size() == x.size(), "{} elements over {} ranks", x.size(), group.size());
    return group.scratch(n * on.M, x.dtype(), x.device(), 1).element_slice(0, {n * on.M});
}

void put(Tensor to, const Tensor& from) { copy(to, from); }

}  // namespace

void hierarchical_all_reduce(Backend& group, const Tensor& x) {
    const Levels on = levels_of(group);
    // tag::lab-across-nodes-all-reduce[]
    ring_reduce_scatter(on.inside, x);
    ring_all_reduce(on.across, segment(x, on.l, on.L));
    ring_all_gather(on.inside, x);
    // end::lab-across-nodes-all-reduce[]
}

void hierarchical_reduce_scatter(Backend& group, const Tensor& x) {
    const Levels on = levels_of(group);
    // tag::lab-across-nodes-reduce-scatter[]
    const Tensor parts = across_parts(group, on, x);
    for (int m = 0; m < on.M; ++m) {
        ring_reduce_scatter(on.inside, segment(x, m, on.M));  // the parts of node m's ranks
        put(segment(parts, m, on.M), segment(x, m * on.L + on.l, group.size()));
    }
    ring_reduce_scatter(on.across, parts);
    put(segment(x, group.rank(), group.size()), segment(parts, on.m, on.M));
    // end::lab-across-nodes-reduce-scatter[]
}

void hierarchical_all_gather(Backend& group, const Tensor& x) {
    const Levels on = levels_of(group);
    // tag::lab-across-nodes-all-gather[]
    const Tensor parts = across_parts(group, on, x);
    put(segment(parts, on.m, on.M), segment(x, group.rank(), group.size()));
    ring_all_gather(on.across, parts);
    for (int m = 0; m < on.M; ++m) {
        put(segment(x, m * on.L + on.l, group.size()), segment(parts, m, on.M));
        ring_all_gather(on.inside, segment(x, m, on.M));
    }
    // end::lab-across-nodes-all-gather[]
}

// ---- two trees ------------------------------------------------------------------------------------------------------

namespace {

// A tree over places 1 to M: 4 above 2 and 6, 2 above 1 and 3, 6 above 5 and 7, and so on: a place's lowest set bit is
// half of its parent's. Odd places are leaves. 0: the root has no parent.
int parent_of(int place, int M) {
    if (place == int(std::bit_floor(unsigned(M)))) return 0;
    do {
        const int lowest = place & -place;
        place = (place ^ lowest) | (2 * lowest);
    } while (place > M);  // a place that is not there: its parent
    return place;
}

}  // namespace

TreePlace tree_place(const std::vector<int>& nodes, int rank, int tree) {
    const std::vector<std::vector<int>> members = by_node(nodes);
    const int M = int(members.size());
    std::vector<int> parents(nodes.size());
    for (int m = 0; m < M; ++m) {
        std::vector<int> chain = members[size_t(m)];
        if (tree == 1)
            std::reverse(chain.begin(), chain.end());  // another rank, with another network card, is its head
        for (size_t i = 1; i < chain.size(); ++i) parents[size_t(chain[i])] = chain[i - 1];
        // In the second tree the nodes have the next places, so that odd ones become even ones.
        const int above = parent_of((m + tree) % M + 1, M);
        const std::vector<int>& head = members[size_t((above - 1 - tree + M) % M)];
        parents[size_t(chain[0])] = above == 0 ? -1 : tree == 1 ? head.back() : head.front();
    }
    TreePlace place{.parent = parents[size_t(rank)], .children = {}};
    for (int r = 0; r < int(parents.size()); ++r) {
        if (parents[size_t(r)] == rank) place.children.push_back(r);
        int depth = 0;
        for (int up = r; parents[size_t(up)] >= 0; up = parents[size_t(up)]) ++depth;
        place.depth = std::max(place.depth, depth);
    }
    return place;
}

void tree_all_reduce(Backend& group, const Tensor& x, int64_t piece_bytes) {
    const std::vector<int> nodes = group.nodes();
    const TreePlace trees[] = {tree_place(nodes, group.rank(), 0), tree_place(nodes, group.rank(), 1)};
    const int64_t K = std::clamp<int64_t>(x.size() / 2 * size_of(x.dtype()) / piece_bytes, 1, 1024);
    const int64_t behind = 2 * std::max(trees[0].depth, trees[1].depth);  // pieces that go up before one comes down
    const auto piece = [&](int64_t k, int tree) { return segment(segment(x, tree, 2), int(k), int(K)); };
    const Tensor received = group.scratch(x.size() / 2 / K + 2, x.dtype(), x.device());
    std::vector<RequestPtr> up(size_t(2 * K)), down;
    // Each receive waits for ranks that are nearer to the leaves (up) or the root (down) of this tree, or have earlier
    // pieces to send: so no ranks wait for each other, even where a send waits for its receiver.
    for (int64_t i = 0; i < K + behind; ++i) {
        for (int tree = 0; tree < 2 && i < K; ++tree) {
            const Tensor sum = piece(i, tree), arrived = received.element_slice(0, {sum.size()});
            for (const int child : trees[tree].children) {
                receive(group, arrived, child);
                add_to(sum, arrived);
            }
            if (trees[tree].parent >= 0)
                up[size_t(2 * i + tree)] = group.exchange(sum, trees[tree].parent, {}, trees[tree].parent);
        }
        for (int tree = 0; tree < 2 && i >= behind; ++tree) {
            const Tensor sum = piece(i - behind, tree);
            if (const RequestPtr& sent = up[size_t(2 * (i - behind) + tree)]) sent->wait();
            if (trees[tree].parent >= 0) receive(group, sum, trees[tree].parent);
            for (const int child : trees[tree].children) down.push_back(group.exchange(sum, child, {}, child));
        }
    }
    for (const RequestPtr& sent : down)
        if (sent) sent->wait();
}

}  // namespace train70b
