#pragma once
// What communication costs on a cluster: a collective or message is a latency, and bytes that must pass links which
// others may use at the same time.
//
// Links, each in two directions: a device's NVLink; a rank's way through host memory; each network adapter of a node (a
// "rail"); with oversubscription also the way from a node to the network above its adapters; and the memory of a node
// whose ranks are processes on its cores. Rank r is device r % gpus_per_node of node r / gpus_per_node. Device d of G
// sends over the node's rails d R / G to (d + 1) R / G, at least one; a group over several nodes uses those of all its
// members in the node.
//
// Algorithms, N members on M nodes, k on each, n bytes; the fastest on idle links is taken, as NCCL's tuner does:
//   ring            every member sends w = 2n(N-1)/N (all-reduce) or n(N-1)/N (all-gather, reduce-scatter): by NVLink
//                   to k - 1 of k neighbors, the node's w divided over its rails. 2(N-1) or N-1 hops.
//   tree            all-reduce: two binary trees over the nodes, a chain inside: 2n up and down; 2(k-1 + log2 M) hops.
//   NVLS            all-reduce inside a node whose switch adds: a device sends n, and its N-th part of the sums.
//   NVLS and tree   all-reduce over nodes: the switch adds inside, and trees add one part per device over the rails.
//   all-to-all      n/N to each member, directly.
//   broadcast       around the ring: every member but the last passes on n bytes.
// Each of them (NVLS, all-to-all and messages: Simple only) with NCCL's protocols Simple, LL128 and LL, from long hops
// and full bandwidth to short hops and a quarter of it. Messages neither on a channel nor in a shift go through host
// memory (comm.h). Scalars, barriers and splits: log2 N hops over the host. CPU ranks: rings over host memory, or
// --all-reduce hierarchical and tree as in across_nodes.h.
#include <map>

#include "08_3d_full/complete/layout/cluster.h"
#include "08_3d_full/plan/op_costs.h"
#include "08_3d_full/plan/sequence.h"

namespace train70b {

struct Transfer {
    double latency_s = 0;                       // of all the algorithm's steps, whatever the bandwidth
    std::vector<std::pair<int, double>> loads;  // link, bytes that must pass it; each link once, ascending
    const char* algorithm = "";                 // "ring", "tree", "NVLS", ...
};

// The links of a cluster. Not for several threads: it remembers groups.
class Network {
  public:
    Network(const ClusterModel& cluster, int64_t ranks);  // usage error: the cluster has too few devices
    int links() const { return rail_link(nodes_, 0, false); }
    double bytes_per_s(int link) const;
    std::string name(int link) const;  // "node 3, rail 0, out"
    // members: world ranks of the group, in its order; sender: the rank in the group that makes the call. The loads of
    // a collective are those of all members, of a message what the sender sends (recv: what it receives).
    Transfer transfer(const CommCall& call, const std::vector<int64_t>& members, int64_t sender) const;
    double seconds_alone(const Transfer& transfer) const;  // on idle links

  private:
    // The members of a group by node.
    struct Group {
        struct Node {
            int64_t node;
            std::vector<int64_t> ranks, rails;  // of the rails: those of all its ranks
        };
        std::vector<Node> nodes;
        int64_t size = 0, largest_node = 0;  // ranks; of the node with the most
        bool one_node() const { return nodes.size() == 1; }
    };
    const Group& group_of(const std::vector<int64_t>& members) const;
    int64_t node_of(int64_t rank) const { return rank / cluster_.gpus_per_node; }
    int64_t first_rail(int64_t rank) const;
    int64_t end_rail(int64_t rank) const;
    int device_link(int64_t rank, bool in) const { return int(2 * rank + in); }
    int host_link(int64_t rank, bool in) const { return int(2 * (ranks_ + rank) + in); }
    int memory_link(int64_t node) const { return int(4 * ranks_ + node); }
    int uplink(int64_t node, bool in) const { return int(4 * ranks_ + nodes_ + 2 * node + in); }
    int rail_link(int64_t node, int64_t rail, bool in) const {
        return int(4 * ranks_ + 3 * nodes_ + 2 * (node * cluster_.rails + rail) + in);
    }
    Transfer message(int64_t from, int64_t to, double bytes, bool host) const;
    Transfer collective(const CommCall& call, const Group& group) const;

    ClusterModel cluster_;
    int64_t ranks_, nodes_;
    mutable std::map<std::vector<int64_t>, Group> groups_;  // that have been asked for
};

// The file that --simulate and --cluster mean: a path, or the name of one in 08_3d_full/plan/clusters, with or without
// ".json". The name itself if there is none.
std::string cluster_path(const std::string& name);

}  // namespace train70b
