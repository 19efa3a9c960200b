#pragma once
// Collectives that know which ranks share a node. N = M L ranks: M nodes with L of them each. n bytes of x; a message
// inside a node takes a seconds and b more per byte, one between nodes A and B.
//                                                                                       sent by a node to others, bytes
//   ring           2 (N-1) A + 2 n B (N-1)/N      as fast as its slowest link           2 n (N-1)/N, by one rank
//   hierarchical   2 (L-1) a + 2 n b (L-1)/L + 2 (M-1) A + 2 n/L B (M-1)/M              2 n (M-1)/M, n/L by each rank
//   tree           2 (log2(M) A + (L-1) a) + 2 n B, and a piece of n per hop            at most 2 n
//
// A ring's latency grows with N, hierarchical's with M + L, the trees' with log2(M): why NCCL takes trees for small
// messages and for many nodes.
#include "02_data_parallel/complete/all_reduce.h"

namespace train70b {

// A sum inside each node, by a ring that leaves each rank a part of it; a ring over the ranks with the same part, one
// of each node, so that every network card of a node sends; all parts inside the node. Usage error if the nodes do not
// hold equally many ranks of the group, or their ranks are not adjacent.
void hierarchical_all_reduce(Backend& group, const Tensor& x);
// As ring_reduce_scatter; x.size() is divisible by the ranks.
void hierarchical_reduce_scatter(Backend& group, const Tensor& x);
// ZeRO-3's: between nodes a rank sends its own part to M - 1 others, instead of everything to the next node. Part
// rank() of x is there; after it all of x is.
void hierarchical_all_gather(Backend& group, const Tensor& x);

// Two binary trees over the nodes, each of which sums half of x on the way up and broadcasts it on the way down, in
// pieces; inside a node its ranks are a chain (Sanders, Speck, Traeff 2009; NCCL 2.4). A node that has children in one
// tree is a leaf of the other, so every node sends and receives about as much. Any number of ranks per node.
void tree_all_reduce(Backend& group, const Tensor& x, int64_t piece_bytes);

// A rank's neighbours in one of the two trees.
struct TreePlace {
    int parent = -1;  // none: the root
    std::vector<int> children;
    int depth = 0;  // of the whole tree: hops from the root to the last rank
};
TreePlace tree_place(const std::vector<int>& nodes, int rank, int tree);

}  // namespace train70b
