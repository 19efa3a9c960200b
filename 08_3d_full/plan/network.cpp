#include "08_3d_full/plan/network.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <filesystem>
#include <functional>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/files.h"

namespace train70b {

namespace {

// NCCL's protocols, relative to Simple, whose hops the cluster file gives: [NCCL] src/graph/tuning.cc, its base and hop
// latencies of rings over NVLink (3.4, 1.9, 0.6 us) and the network (14, 4, 2.7 us), and its shares of the bandwidth.
struct Protocol {
    double base_s;     // of a call, whatever the group
    double near, far;  // times a hop inside a node, between nodes
    double bytes;      // times the bytes
};
constexpr Protocol kProtocols[] = {{8.4e-6, 1, 1, 1},              // Simple
                                   {14e-6, 0.56, 0.29, 1 / 0.92},  // LL128: 120 of 128 bytes are data
                                   {6.6e-6, 0.18, 0.19, 3.8}};     // LL: a flag beside each 4 bytes
constexpr double kTreeBytes = 1 / 0.92;                            // [NCCL]: trees reach 92% of the ring's bandwidth
constexpr double kNvlsSeconds = 25e-6;                             // [NCCL]
// 8 H200: a bus bandwidth of 482 GB/s, where the ring has 368 (8 H100: 480 and 370, docs/links.md), is 1.31 times
// the ring's: a device's link then carries its n (N+1)/N bytes at 84% of the ring's rate.
constexpr double kNvlsBytes = 1.19;

double log2_up(int64_t n) { return std::bit_width(uint64_t(n - 1)); }

}  // namespace

Network::Network(const ClusterModel& cluster, int64_t ranks)
    : cluster_(cluster), ranks_(ranks), nodes_((ranks + cluster.gpus_per_node - 1) / cluster.gpus_per_node) {
    CHECK(ranks > 0 && cluster.gpus_per_node > 0 && cluster.rails > 0, "{} ranks", ranks);
    if (ranks > cluster.devices())
        usage_error("{} has {} devices, {} ranks need {} nodes of {}", cluster.name, cluster.devices(), ranks, nodes_,
                    cluster.gpus_per_node);
    const bool near = cluster.nvlink.bytes_per_s > 0 || cluster.host.bytes_per_s > 0;
    CHECK((near || ranks == 1 || cluster.gpus_per_node == 1) && (cluster.rail.bytes_per_s > 0 || nodes_ == 1),
          "the devices of {} are not connected", cluster.name);
    // Without a way through host memory, messages of MPI take the device's.
    if (!(cluster_.host.bytes_per_s > 0)) cluster_.host = near ? cluster_.nvlink : cluster_.rail;
}

int64_t Network::first_rail(int64_t rank) const {
    return rank % cluster_.gpus_per_node * cluster_.rails / cluster_.gpus_per_node;
}
int64_t Network::end_rail(int64_t rank) const {
    const int64_t end = (rank % cluster_.gpus_per_node + 1) * cluster_.rails / cluster_.gpus_per_node;
    return std::max(end, first_rail(rank) + 1);
}

double Network::bytes_per_s(int link) const {
    if (link < 2 * ranks_)
        return cluster_.nvlink.bytes_per_s > 0 ? cluster_.nvlink.bytes_per_s : cluster_.host.bytes_per_s;
    if (link < 4 * ranks_) return cluster_.host.bytes_per_s;
    if (link < 4 * ranks_ + nodes_) return cluster_.host.bytes_per_s * double(std::max<int64_t>(cluster_.cores, 1));
    if (link < 4 * ranks_ + 3 * nodes_)
        return cluster_.rail.bytes_per_s * double(cluster_.rails) / cluster_.oversubscription;
    return cluster_.rail.bytes_per_s;
}

std::string Network::name(int link) const {
    const auto direction = [](int64_t i) { return i % 2 ? "in" : "out"; };
    int64_t i = link;
    if (i < 2 * ranks_) return fmt::format("rank {}, NVLink, {}", i / 2, direction(i));
    if (i -= 2 * ranks_; i < 2 * ranks_) return fmt::format("rank {}, host memory, {}", i / 2, direction(i));
    if (i -= 2 * ranks_; i < nodes_) return fmt::format("node {}, memory", i);
    if (i -= nodes_; i < 2 * nodes_) return fmt::format("node {}, network, {}", i / 2, direction(i));
    i -= 2 * nodes_;
    return fmt::format("node {}, rail {}, {}", i / 2 / cluster_.rails, i / 2 % cluster_.rails, direction(i));
}

const Network::Group& Network::group_of(const std::vector<int64_t>& members) const {
    const auto [known, is_new] = groups_.try_emplace(members);
    Group& group = known->second;
    if (!is_new) return group;
    std::vector<int64_t> ranks = members;
    std::sort(ranks.begin(), ranks.end());
    CHECK(!ranks.empty() && ranks.front() >= 0 && ranks.back() < ranks_, "a group of {} ranks", ranks.size());
    group.size = int64_t(ranks.size());
    for (const int64_t rank : ranks) {
        if (group.nodes.empty() || group.nodes.back().node != node_of(rank)) group.nodes.push_back({node_of(rank)});
        Group::Node& node = group.nodes.back();
        node.ranks.push_back(rank);
        for (int64_t rail = first_rail(rank); rail < end_rail(rank); ++rail)
            if (node.rails.empty() || node.rails.back() < rail) node.rails.push_back(rail);
        group.largest_node = std::max(group.largest_node, int64_t(node.ranks.size()));
    }
    return group;
}

Transfer Network::message(int64_t from, int64_t to, double bytes, bool host) const {
    Transfer transfer{.algorithm = "message"};
    const bool near = node_of(from) == node_of(to), staged = host || !(cluster_.nvlink.bytes_per_s > 0);
    const ClusterModel::Link& link = staged ? cluster_.host : cluster_.nvlink;
    transfer.latency_s = staged ? 0 : kProtocols[0].base_s;
    if (near || staged) transfer.latency_s += link.seconds;
    if (!near) transfer.latency_s += cluster_.rail.seconds;
    const auto load = [&](int where, double amount) { transfer.loads.emplace_back(where, amount); };
    if (near || host) {
        load(staged ? host_link(from, false) : device_link(from, false), bytes);
        load(staged ? host_link(to, true) : device_link(to, true), bytes);
    }
    if (cluster_.cores > 0) {
        load(memory_link(node_of(from)), bytes);
        if (!near) load(memory_link(node_of(to)), bytes);
    }
    if (!near)
        for (const auto& [rank, in] : {std::pair{from, false}, {to, true}}) {
            const int64_t rails = end_rail(rank) - first_rail(rank);
            for (int64_t rail = first_rail(rank); rail < end_rail(rank); ++rail)
                load(rail_link(node_of(rank), rail, in), bytes / double(rails));
            if (cluster_.oversubscription > 1) load(uplink(node_of(rank), in), bytes);
        }
    std::sort(transfer.loads.begin(), transfer.loads.end());
    return transfer;
}

Transfer Network::collective(const CommCall& call, const Group& group) const {
    const double n = double(call.bytes), N = double(group.size), M = double(group.nodes.size());
    const bool gpu = cluster_.cores == 0, nvlink = cluster_.nvlink.bytes_per_s > 0, alone = group.one_node();
    const ClusterModel::Link& near = nvlink ? cluster_.nvlink : cluster_.host;

    struct Algorithm {
        const char* name;
        double near_hops, far_hops, seconds;  // seconds: besides the hops
        // Bytes that a device sends inside its node, and that its node sends to others, if it has k members.
        std::function<double(double k)> near, far;
    };
    std::vector<Algorithm> algorithms;
    // Around a ring of N - 1 hops, or 2 (N - 1), that visits one node after the other.
    const auto ring = [&](const char* name, double w, double rounds) {
        const double far = alone ? 0 : std::min(M, N - 1);
        algorithms.push_back({name, rounds * (N - 1 - far), rounds * far, 0,
                              [w, alone](double k) { return alone ? w : w * (k - 1) / k; }, [w](double) { return w; }});
    };
    // across_nodes.h. times: 2 for an all-reduce. What a rank sends inside its node comes before or after what it
    // sends to others.
    const auto hierarchical = [&](double times, double rings_inside) {
        const double L = double(group.largest_node), across = times * n * (M - 1) / M;
        if (L * M != N) usage_error("--all-reduce hierarchical: nodes with {} ranks of a group, and with fewer", L);
        algorithms.push_back({"hierarchical", rings_inside * (L - 1), times * (M - 1),
                              times * n * (L - 1) / L / near.bytes_per_s, [](double) { return 0; },
                              [across](double) { return across; }});
    };
    const bool levels = !gpu && !alone && cluster_.all_reduce == "hierarchical";
    if (call.operation == "all_reduce") {
        const bool trees = !gpu && cluster_.all_reduce == "tree";
        if (!trees) levels ? hierarchical(2, 2) : ring("ring", 2 * n * (N - 1) / N, 2);
        // Every node but the roots sends n up and 2 n down over both trees; with two or three nodes there is less.
        const double tree = 2 * n * std::min(1.0, M / 4), more = gpu ? kTreeBytes : 1;
        const double inside = 2 * double(group.largest_node - 1), up_and_down = 2 * log2_up(int64_t(M));
        if (gpu || trees)
            algorithms.push_back({"tree", inside, up_and_down, 0, [=](double k) { return k > 1 ? 2 * n * more : 0; },
                                  [=](double) { return tree * more; }});
        const bool whole_nodes =
            group.largest_node * int64_t(group.nodes.size()) == group.size && group.largest_node > 1;
        if (gpu && cluster_.nvls && whole_nodes)
            algorithms.push_back({alone ? "NVLS" : "NVLS and tree", 0, up_and_down, kNvlsSeconds,
                                  [n](double k) { return kNvlsBytes * n * (k + 1) / k; },
                                  [tree](double) { return tree; }});
    } else if (call.operation == "all_to_all") {
        algorithms.push_back({"direct", alone ? 1.0 : 0, alone ? 0 : 1.0, 0, [=](double k) { return n / N * (k - 1); },
                              [=](double k) { return k * n / N * (N - k); }});
    } else if (call.operation == "broadcast") {
        ring("ring", n, 1);
    } else {
        CHECK(call.operation == "all_gather" || call.operation == "reduce_scatter", "{}", call.operation);
        levels ? hierarchical(1, M) : ring("ring", n * (N - 1) / N, 1);
    }

    // The fastest on idle links. Of a protocol all bytes are the same multiple.
    const Algorithm* best = nullptr;
    double best_seconds = INFINITY, latency = 0, multiple = 1;
    for (const Algorithm& algorithm : algorithms) {
        double seconds = 0;
        for (const Group::Node& node : group.nodes) {
            const double k = double(node.ranks.size());
            seconds = std::max(seconds, algorithm.near(k) / near.bytes_per_s);
            if (!alone) {
                const double out = algorithm.far(k) / cluster_.rail.bytes_per_s;
                seconds = std::max({seconds, out / double(node.rails.size()),
                                    out * cluster_.oversubscription / double(cluster_.rails)});
            }
        }
        for (const Protocol& protocol : kProtocols) {
            const bool simple = &protocol == kProtocols, nvls = algorithm.seconds > 0;
            if (!simple && (!gpu || nvls || call.operation == "all_to_all")) continue;
            const double hops = algorithm.near_hops * near.seconds * protocol.near +
                                algorithm.far_hops * cluster_.rail.seconds * protocol.far + algorithm.seconds +
                                (gpu ? protocol.base_s : 0);
            if (const double total = hops + seconds * protocol.bytes; total < best_seconds) {
                best = &algorithm;
                best_seconds = total;
                latency = hops;
                multiple = protocol.bytes;
            }
        }
    }

    Transfer transfer{.latency_s = latency, .algorithm = best->name};
    const auto load = [&](int out, int in, double amount) {
        if (!(amount > 0)) return;
        transfer.loads.emplace_back(out, amount * multiple);
        if (in != out) transfer.loads.emplace_back(in, amount * multiple);
    };
    for (const auto& [node, ranks, rails] : group.nodes) {
        const double k = double(ranks.size()), inside = best->near(k), out = alone ? 0 : best->far(k);
        for (const int64_t rank : ranks)
            nvlink ? load(device_link(rank, false), device_link(rank, true), inside)
                   : load(host_link(rank, false), host_link(rank, true), inside);
        if (!gpu) load(memory_link(node), memory_link(node), inside * k);
        if (cluster_.oversubscription > 1) load(uplink(node, false), uplink(node, true), out);
        for (const int64_t rail : rails)
            load(rail_link(node, rail, false), rail_link(node, rail, true), out / double(rails.size()));
    }
    std::sort(transfer.loads.begin(), transfer.loads.end());
    return transfer;
}

Transfer Network::transfer(const CommCall& call, const std::vector<int64_t>& members, int64_t sender) const {
    if (members.size() <= 1 || call.operation == "finish") return {};
    if (call.message()) {
        const int64_t me = members.at(size_t(sender));
        const int64_t from = call.to >= 0 ? me : members.at(size_t(call.from));
        const int64_t to = call.to >= 0 ? members.at(size_t(call.to)) : me;
        return from == to ? Transfer{} : message(from, to, double(call.bytes), !call.channel && !call.shift);
    }
    const Group& group = group_of(members);
    if (!call.of_host()) return collective(call, group);
    const double bytes = double(call.bytes) * double(group.size - 1);
    const double rate = group.one_node() ? cluster_.host.bytes_per_s : cluster_.rail.bytes_per_s;
    return {.latency_s = log2_up(group.largest_node) * cluster_.host.seconds +
                         log2_up(int64_t(group.nodes.size())) * cluster_.rail.seconds + bytes / rate,
            .algorithm = "host"};
}

double Network::seconds_alone(const Transfer& transfer) const {
    double seconds = 0;
    for (const auto& [link, bytes] : transfer.loads) seconds = std::max(seconds, bytes / bytes_per_s(link));
    return transfer.latency_s + seconds;
}

std::string cluster_path(const std::string& name) {
    std::error_code error;
    if (std::filesystem::exists(name, error) || name.find('/') != std::string::npos) return name;
    for (const char* ending : {"", ".json"}) {
        const std::string known = repository_file("08_3d_full/plan/clusters/" + name + ending);
        if (!name.empty() && std::filesystem::is_regular_file(known, error)) return known;
    }
    return name;
}

}  // namespace train70b
