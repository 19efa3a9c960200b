// What a cluster costs: files, ops by shape, collectives and messages on links; by hand, and against op-level figures.
#include "tests/costs.h"

using namespace train70b;
using namespace train70b::test;

// ---- collectives ----------------------------------------------------------------------------------------------------

TEST_CASE("ring all-reduce in a node: 2 n (N-1)/N bytes out of and into every device, 2 (N-1) hops") {
    const ClusterModel cluster = by_hand(1);
    const double n = 1 << 30;
    const auto [transfer, seconds] = cost(cluster, comm_call("all_reduce", n), every(8));
    EXPECT(std::string(transfer.algorithm) == "ring");
    EXPECT(transfer.latency_s == Approx(8.4e-6 + 14 * 2e-6));
    EXPECT(seconds == Approx(2 * n * 7 / 8 / 400e9 + transfer.latency_s));
    const auto loads = named(cluster, transfer);
    EXPECT(loads.size() == 16);
    EXPECT(loads.at("rank 3, NVLink, out") == Approx(2 * n * 7 / 8));
    EXPECT(loads.at("rank 3, NVLink, in") == Approx(2 * n * 7 / 8));
    for (const char* operation : {"all_gather", "reduce_scatter"}) {
        const Cost half = cost(cluster, comm_call(operation, n), every(8));
        EXPECT(half.latency() == Approx(8.4e-6 + 7 * 2e-6));
        EXPECT(half.moving() == Approx(n * 7 / 8 / 400e9));
    }
    EXPECT(cost(cluster, comm_call("all_reduce", n), {5}).seconds == 0);
}

TEST_CASE("two nodes of 8: eight rails carry what one carries eight times as long") {
    const double n = 1 << 30, w = 2 * n * 15 / 16;
    const auto [transfer, seconds] = cost(by_hand(2), comm_call("all_reduce", n), every(16));
    const auto loads = named(by_hand(2), transfer);
    EXPECT(loads.size() == 2 * 16 + 2 * 16);
    EXPECT(loads.at("node 1, rail 7, out") == Approx(w / 8));
    EXPECT(loads.at("rank 9, NVLink, in") == Approx(w * 7 / 8));  // of 8 neighbors one is in the other node
    EXPECT(seconds == Approx(w / 8 / 50e9 + transfer.latency_s));
    EXPECT(transfer.latency_s == Approx(8.4e-6 + 2 * (13 * 2e-6 + 2 * 10e-6)));  // 15 hops, 2 of them between nodes
    for (const auto& [operation, nodes] : {std::pair{"all_gather", 2}, {"all_reduce", 4}})
        EXPECT(cost(by_hand(nodes, 1), comm_call(operation, n), every(8 * nodes)).moving() ==
               Approx(8 * cost(by_hand(nodes), comm_call(operation, n), every(8 * nodes)).moving()));
    // Over one rail between two nodes, a tree sends n where the ring sends w.
    const Cost one = cost(by_hand(2, 1), comm_call("all_reduce", n), every(16));
    EXPECT(std::string(one.transfer.algorithm) == "tree");
    EXPECT(one.moving() == Approx(n / 0.92 / 50e9));
    EXPECT(one.latency() ==
           Approx(8.4e-6 + 2 * 7 * 2e-6 + 2 * 10e-6));  // up and down: 7 in the node, one between nodes
    // Two ranks of two nodes: the ring's only hop is between them.
    EXPECT(cost(by_hand(2), comm_call("all_gather", n), {0, 8}).latency() == Approx(8.4e-6 + 10e-6));
}

TEST_CASE("groups use the rails of their members; those inside a node none") {
    const double n = 1 << 30;
    for (const int64_t rails : {1, 2, 8, 16}) {
        const ClusterModel cluster = by_hand(2, rails);
        EXPECT(cost(cluster, comm_call("all_reduce", n), every(8)).seconds ==
               cost(by_hand(1), comm_call("all_reduce", n), every(8)).seconds);
        // Eight groups of the same device of both nodes: each on its rails.
        std::map<std::string, double> total;
        for (int64_t d = 0; d < 8; ++d) {
            const Cost group = cost(cluster, comm_call("all_gather", n), {d, d + 8});
            const auto loads = named(cluster, group.transfer);
            for (const auto& [link, bytes] : loads) total[link] += bytes;
            EXPECT(loads.size() == size_t(4 * std::max<int64_t>(rails / 8, 1)));
            EXPECT(loads.count(fmt::format("node 0, rail {}, out", d * rails / 8)) == 1);
            EXPECT(group.moving() == Approx(n / 2 / 50e9 / double(std::max<int64_t>(rails / 8, 1))));
        }
        EXPECT(total.size() == size_t(4 * rails));
        for (const auto& [link, bytes] : total) EXPECT(bytes == Approx(8 * n / 2 / double(rails)));
    }
    // Two members in one node, three in the other, of odd ranks.
    const ClusterModel cluster = by_hand(2);
    const auto loads = named(cluster, cost(cluster, comm_call("all_gather", n), {1, 3, 9, 11, 13}).transfer);
    EXPECT(loads.at("node 0, rail 3, out") == Approx(n * 4 / 5 / 2));
    EXPECT(loads.at("node 1, rail 5, in") == Approx(n * 4 / 5 / 3));
    EXPECT(loads.at("rank 1, NVLink, out") == Approx(n * 4 / 5 / 2));
    EXPECT(loads.count("node 0, rail 0, out") == 0);
}

TEST_CASE("the network above the adapters: shared by a node's groups if it is oversubscribed") {
    ClusterModel cluster = by_hand(2);
    const CommCall call = comm_call("all_gather", 1 << 30);
    const Cost plain = cost(cluster, call, every(16));
    EXPECT(named(cluster, plain.transfer).count("node 0, network, out") == 0);
    cluster.oversubscription = 3;
    const Cost shared = cost(cluster, call, every(16));
    EXPECT(named(cluster, shared.transfer).count("node 0, network, out") == 1);
    EXPECT(shared.moving() == Approx(3 * plain.moving()));
    EXPECT(cost(cluster, call, {0, 8}).moving() == Approx(cost(by_hand(2), call, {0, 8}).moving()));  // one rail of 8
    CommCall send = call;  // a message, too, passes it
    send.to = 1;
    send.channel = true;
    EXPECT(named(cluster, cost(cluster, send, {0, 8}).transfer).at("node 1, network, in") == double(send.bytes));
    EXPECT(named(by_hand(2), cost(by_hand(2), send, {0, 8}).transfer).count("node 1, network, in") == 0);
}

TEST_CASE("every collective's loads are at least the bytes that it books, and grow with the message") {
    for (const ClusterModel& cluster : {by_hand(4), by_hand(4, 1), cluster_of("cpu.json")})
        for (const std::vector<int64_t>& members : {every(2), every(8), every(4, 8), every(6, 5), every(32), {0, 1, 9}})
            for (const char* operation : {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"}) {
                const double N = double(members.size());
                double before = 0;
                for (double n = 64; n < 1e11; n *= 4) {
                    INFO(cluster.name, ", ", operation, ", ", n, " bytes, ", N, " ranks");
                    const auto [transfer, seconds] = cost(cluster, comm_call(operation, n), members);
                    const bool all_reduce = std::string(operation) == "all_reduce";
                    double sent = 0;
                    for (const auto& [link, bytes] : named(cluster, transfer))
                        if (link.ends_with("out")) sent += bytes;
                    EXPECT(sent >= (all_reduce ? 2 : 1) * n * (N - 1) * (1 - 1e-12));
                    EXPECT(seconds >= before);
                    EXPECT(seconds > transfer.latency_s);
                    before = seconds;
                }
            }
}

TEST_CASE("the fastest algorithm: trees and short hops for small messages, NVLS in a node whose switch adds") {
    // 8 H200, as measured: a bus bandwidth of 368 GB/s, and 482 with NVLS.
    ClusterModel h200 = cluster_of("h200-8.json");
    const double n = double(int64_t{16} << 30);
    const Cost nvls = cost(h200, comm_call("all_reduce", n), every(8));
    EXPECT(2 * n * 7 / 8 / nvls.seconds == Approx(482e9).epsilon(0.02));
    EXPECT(std::string(nvls.transfer.algorithm) == "NVLS");
    // Only for groups with as many members in every node.
    ClusterModel switches = by_hand(2);
    switches.nvls = true;
    EXPECT(std::string(cost(switches, comm_call("all_reduce", n), every(16)).transfer.algorithm) == "NVLS and tree");
    EXPECT(std::string(cost(switches, comm_call("all_reduce", n), every(9)).transfer.algorithm) == "tree");
    h200.nvls = false;
    EXPECT(2 * n * 7 / 8 / cost(h200, comm_call("all_reduce", n), every(8)).seconds == Approx(368e9).epsilon(0.02));
    // 2 nodes of 8 H100 with 8 x 400 Gb/s: about 470 GB/s (NVIDIA/nccl #2409); 4 nodes: 320 (#1221); 248 nodes of H200:
    // 350 (nccl-tests #283).
    const ClusterModel h100 = cluster_of("h100-16384.json");
    for (const auto& [nodes, measured] : {std::pair{2, 470e9}, {4, 320e9}, {248, 350e9}}) {
        const Cost all = cost(h100, comm_call("all_reduce", n), every(8 * nodes));
        const double bus = 2 * n * (1 - 1 / (8.0 * nodes)) / all.seconds;
        INFO(nodes, " nodes: ", bus / 1e9, " GB/s by ", all.transfer.algorithm);
        EXPECT(bus == Approx(measured).epsilon(0.15));
    }
    // 1,024 ranks and one number: 2046 hops around a ring, and 34 over trees.
    const Cost tree = cost(h100, comm_call("all_reduce", 4), every(1024));
    EXPECT(std::string(tree.transfer.algorithm) == "tree");
    EXPECT(tree.seconds < 100e-6);
    EXPECT(cost(h100, comm_call("all_gather", 1024), every(1024)).seconds > 2 * tree.seconds);
}

TEST_CASE("all-to-all: directly, by NVLink inside the node and by the rails to others") {
    const double n = 1 << 30;
    const auto loads = named(by_hand(2), cost(by_hand(2), comm_call("all_to_all", n), every(16)).transfer);
    EXPECT(loads.at("rank 2, NVLink, out") == Approx(n * 7 / 16));
    EXPECT(loads.at("node 0, rail 2, in") == Approx(n * 8 / 16));
    EXPECT(cost(by_hand(1), comm_call("all_to_all", n), every(8)).moving() == Approx(n * 7 / 8 / 400e9));
    // Its messages have one protocol, however small.
    EXPECT(cost(by_hand(1), comm_call("all_to_all", 8), every(8)).latency() == Approx(8.4e-6 + 2e-6));
}

TEST_CASE("messages: a channel from device to device, others through host memory, each loads its own way") {
    const ClusterModel cluster = by_hand(2);
    const double n = 1 << 20;
    const auto send = [&](int64_t to, bool channel, bool shift = false) {
        CommCall call = comm_call("send", n);
        call.to = int(to);
        call.channel = channel;
        call.shift = shift;
        return cost(cluster, call, every(16), 1);
    };
    EXPECT(send(2, true).latency() == Approx(8.4e-6 + 2e-6));
    EXPECT(send(2, true).moving() == Approx(n / 400e9));
    EXPECT(send(2, false, true).seconds == send(2, true).seconds);
    EXPECT(send(9, true).latency() == Approx(8.4e-6 + 10e-6));
    EXPECT(send(9, true).moving() == Approx(n / 50e9));
    const auto far = named(cluster, send(10, true).transfer);
    EXPECT(far.size() == 2);
    EXPECT(far.at("node 0, rail 1, out") == n);
    EXPECT(far.at("node 1, rail 2, in") == n);
    EXPECT(named(cluster, send(9, false).transfer).count("rank 1, host memory, out") == 1);
    EXPECT(send(9, false).latency() == Approx(5e-6 + 10e-6));
    EXPECT(send(2, false).moving() == Approx(n / 20e9));
    // A receive is the message of its sender; send_recv what it sends.
    CommCall receive{.operation = "recv", .bytes = int64_t(n), .from = 2, .channel = true};
    EXPECT(named(cluster, cost(cluster, receive, every(16), 1).transfer).count("rank 2, NVLink, out") == 1);
    CommCall both{.operation = "send_recv", .bytes = int64_t(n), .to = 2, .from = 0, .received = 5, .shift = true};
    EXPECT(cost(cluster, both, every(16), 1).seconds == send(2, true).seconds);
}

TEST_CASE("host numbers: a latency that grows with the logarithm, no loads") {
    for (const char* operation : {"scalar", "barrier", "split"}) {
        const Cost near = cost(by_hand(4), comm_call(operation, 8), every(8));
        const Cost far = cost(by_hand(4), comm_call(operation, 8), every(32));
        EXPECT(near.transfer.loads.empty());
        EXPECT(near.seconds == Approx(3 * 5e-6).epsilon(0.01));
        EXPECT(far.seconds == Approx(3 * 5e-6 + 2 * 10e-6).epsilon(0.01));
        // Many numbers: of the seven others.
        EXPECT(cost(by_hand(4), comm_call(operation, 1e9), every(8)).seconds == Approx(3 * 5e-6 + 7e9 / 20e9));
    }
    EXPECT(cost(by_hand(4), comm_call("finish", 0), every(32)).seconds == 0);
}

TEST_CASE("ranks on the cores of a node share its memory") {
    const ClusterModel cpu = cluster_of("cpu.json");
    const double n = 1 << 24;
    const auto loads = named(cpu, cost(cpu, comm_call("all_reduce", n), every(4)).transfer);
    EXPECT(loads.at("node 0, memory") == Approx(4 * 2 * n * 3 / 4));
    EXPECT(loads.at("rank 3, host memory, in") == Approx(2 * n * 3 / 4));
    // Four ranks on two cores copy at the rate of two.
    EXPECT(cost(cpu, comm_call("all_reduce", n), every(4)).moving() ==
           Approx(2 * 2 * n * 3 / 4 / cpu.host.bytes_per_s));
    // A message to another node passes both memories.
    ClusterModel two = cpu;
    two.nodes = 2;
    two.rail = {1e9, 1e-6, "network"};
    CommCall send = comm_call("send", n);
    send.to = 1;
    const auto far = named(two, cost(two, send, {0, 64}).transfer);
    EXPECT(far.at("node 0, memory") == n);
    EXPECT(far.at("node 1, memory") == n);
}

TEST_CASE("CPU ranks over nodes: by the all-reduce of the run, as across_nodes.h has it") {
    ClusterModel box = cluster_of("box.json");  // three nodes of two
    const double n = 6 << 20, a = box.host.seconds, A = box.rail.seconds, b = 1 / box.host.bytes_per_s;
    const auto taken = [&](const char* algorithm, const char* operation, const std::vector<int64_t>& members) {
        box.all_reduce = algorithm;
        return cost(box, comm_call(operation, n), members);
    };
    struct Expected {
        const char *algorithm, *operation;
        double before, bytes;  // the first byte; what a node sends to others
    };
    for (const Expected& expected : {Expected{"ring", "all_reduce", 2 * (2 * a + 3 * A), 2 * n * 5 / 6},
                                     {"hierarchical", "all_reduce", 2 * a + n * b + 4 * A, 2 * n * 2 / 3},
                                     {"tree", "all_reduce", 2 * (a + 2 * A), 1.5 * n},
                                     {"ring", "all_gather", 2 * a + 3 * A, n * 5 / 6},
                                     {"tree", "reduce_scatter", 2 * a + 3 * A, n * 5 / 6},
                                     {"hierarchical", "all_gather", 3 * a + n / 2 * b + 2 * A, n * 2 / 3},
                                     {"hierarchical", "reduce_scatter", 3 * a + n / 2 * b + 2 * A, n * 2 / 3}}) {
        INFO(expected.algorithm, " ", expected.operation);
        const Cost all = taken(expected.algorithm, expected.operation, every(6));
        EXPECT(all.latency() == Approx(expected.before));
        const auto loads = named(box, all.transfer);
        for (const char* link : {"node 0, rail 0, out", "node 1, rail 0, in", "node 2, rail 0, out"})
            EXPECT(loads.at(link) == Approx(expected.bytes));
        EXPECT(all.moving() == Approx(expected.bytes / box.rail.bytes_per_s));
        box.rail.bytes_per_s /= 2;
        EXPECT(taken(expected.algorithm, expected.operation, every(6)).moving() == Approx(2 * all.moving()));
        box.rail.bytes_per_s *= 2;
    }
    for (const char* other : {"", "library", "halving"})
        EXPECT(taken(other, "all_reduce", every(6)).seconds == taken("ring", "all_reduce", every(6)).seconds);
    EXPECT(taken("hierarchical", "all_reduce", {4, 5}).seconds == taken("ring", "all_reduce", {4, 5}).seconds);
    EXPECT_USAGE_ERROR(taken("hierarchical", "all_reduce", {0, 1, 2}), "nodes with 2 ranks of a group, and with fewer");
}

TEST_CASE("16,384 ranks: groups of 2,048 over all nodes, and of all") {
    const ClusterModel cluster = cluster_of("h100-16384.json");
    const Network network(cluster, 16384);
    EXPECT(network.links() == 4 * 16384 + 3 * 2048 + 2 * 8 * 2048);
    const Transfer strided = network.transfer(comm_call("reduce_scatter", 1e9), every(2048, 8, 3), 0);
    EXPECT(strided.loads.size() == 2 * 2048);
    EXPECT(network.name(strided.loads[1].first) == "node 0, rail 3, in");
    EXPECT(network.seconds_alone(strided) ==
           Approx(14e-6 + 2047 * 0.29 * 14e-6 + 1e9 / 0.92 * 2047 / 2048 / 45e9));  // LL128
    EXPECT(network.transfer(comm_call("all_gather", 1e9), every(16384), 0).loads.size() == 2 * 16384 + 2 * 8 * 2048);
    EXPECT_USAGE_ERROR(Network(cluster, 16385), "16385 ranks need 2049 nodes of 8");
}
