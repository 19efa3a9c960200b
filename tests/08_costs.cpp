// What a cluster costs: files, ops by shape, collectives and messages on links; by hand, and against op-level figures.
#include <filesystem>
#include <numeric>

#include "08_3d_full/plan/network.h"
#include "tests/support.h"

using namespace train70b;

namespace {

// Relative: doctest's own adds 1 to the numbers, which leaves room for 12 microseconds.
doctest::Approx Approx(double number) { return doctest::Approx(number).scale(0); }

ClusterModel cluster_of(const std::string& name) { return read_cluster("08_3d_full/clusters/" + name, "--simulate"); }

// Nodes of 8 with a ring of 400 GB/s, 8 rails of 50 GB/s, and no NVLS.
ClusterModel by_hand(int64_t nodes, int64_t rails = 8) {
    return {.name = "by hand",
            .device = named_devices()[1],
            .nodes = nodes,
            .gpus_per_node = 8,
            .nvlink = {400e9, 2e-6, "NVLink"},
            .rail = {50e9, 10e-6, "network"},
            .rails = rails,
            .host = {20e9, 5e-6, "host"}};
}

std::vector<int64_t> every(int64_t count, int64_t stride = 1, int64_t first = 0) {
    std::vector<int64_t> ranks(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) ranks[size_t(i)] = first + i * stride;
    return ranks;
}

CommCall comm_call(const std::string& operation, double bytes) {
    return {.operation = operation, .bytes = int64_t(bytes)};
}

struct Cost {
    Transfer transfer;
    double seconds;
    double latency() const { return transfer.latency_s; }
    double moving() const { return seconds - transfer.latency_s; }
};
Cost cost(const ClusterModel& cluster, const CommCall& call, const std::vector<int64_t>& members, int64_t sender = 0) {
    const Network network(cluster, cluster.devices());
    const Transfer transfer = network.transfer(call, members, sender);
    return {transfer, network.seconds_alone(transfer)};
}

std::map<std::string, double> named(const ClusterModel& cluster, const Transfer& transfer) {
    const Network network(cluster, cluster.devices());
    std::map<std::string, double> loads;
    for (const auto& [link, bytes] : transfer.loads) EXPECT(loads.emplace(network.name(link), bytes).second);
    EXPECT(std::is_sorted(transfer.loads.begin(), transfer.loads.end()));
    return loads;
}

// One op at a time, so that the device stays cool.
const DeviceModel& device(const std::string& name) {
    static std::map<std::string, DeviceModel> cool;
    for (const DeviceModel& candidate : named_devices()) {
        if (candidate.name != name) continue;
        DeviceModel& device = cool[name] = candidate;
        device.sustained = device.sustained_fp8 = 1;
        return device;
    }
    throw std::logic_error("no device " + name);
}

OpCall product(int64_t m, int64_t n, int64_t k, DType dtype = DType::bf16) {
    const double size = double(size_of(dtype));
    return {.name = dtype == DType::e4m3 ? "scaled_matmul" : "matmul",
            .shape = {m, n, k},
            .dtype = dtype,
            .flops = 2.0 * double(m) * double(n) * double(k),
            .bytes = size * (double(m) * double(k) + double(n) * double(k)) + 2 * double(m) * double(n)};
}
OpCall attention(bool backward, int64_t batch, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
                 bool causal) {
    const double pairs = causal ? double(tokens) * double(tokens + 1) / 2 : double(tokens) * double(tokens);
    const double passes = backward ? 3 : 1;
    return {.name = backward ? "attention_backward" : "attention",
            .shape = {batch, tokens, tokens, heads, kv_heads, head_dim, causal},
            .dtype = DType::bf16,
            .flops = (backward ? 10 : 4) * pairs * double(batch * heads * head_dim),
            .bytes = passes * 2 * double(batch * tokens * (2 * heads + 2 * kv_heads) * head_dim)};
}
double rate(const DeviceModel& on, const OpCall& op) { return op.flops / op_seconds(on, op); }

}  // namespace

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

// ---- ops ------------------------------------------------------------------------------------------------------------

TEST_CASE("what a device sustains: products and attention are slower by it, copies are not") {
    DeviceModel h100 = device("H100"), busy = h100;
    busy.sustained = 0.8;
    busy.sustained_fp8 = 0.9;
    h100.launch_s = busy.launch_s = 0;
    const auto slower = [&](const OpCall& op) { return op_seconds(busy, op) / op_seconds(h100, op); };
    EXPECT(slower(product(8192, 8192, 8192)) == Approx(1 / 0.8));
    EXPECT(slower(product(8192, 8192, 8192, DType::e4m3)) == Approx(1 / 0.9));
    OpCall attention{.name = "attention", .shape = {1, 8192, 8192, 32, 8, 128, 1}, .dtype = DType::bf16, .flops = 1e13};
    EXPECT(slower(attention) == Approx(1 / 0.8));
    EXPECT(slower({.name = "add", .dtype = DType::bf16, .bytes = 1e9}) == Approx(1));
}

TEST_CASE("large products reach what was measured; small and odd ones less") {
    const DeviceModel& h200 = device("H200");
    EXPECT(rate(h200, product(8192, 8192, 8192)) == Approx(795e12).epsilon(0.03));
    EXPECT(rate(h200, product(16384, 8192, 28672)) == Approx(795e12).epsilon(0.05));
    EXPECT(rate(h200, product(8192, 8192, 8192, DType::e4m3)) == Approx(1450e12).epsilon(0.03));
    double before = 0;
    for (int64_t side = 64; side <= 8192; side *= 2) {
        const double now = rate(h200, product(side, side, side));
        INFO(side, ": ", now / 1e12);
        EXPECT(now > before);
        before = now;
    }
    // cuBLAS on a B200: 1006, 1532 and 1610 TFLOP/s.
    const DeviceModel& b200 = device("B200");
    const double large = rate(b200, product(8192, 8192, 8192));
    EXPECT(rate(b200, product(4096, 4096, 4096)) / large == Approx(1532.0 / 1610).epsilon(0.1));
    EXPECT(rate(b200, product(2048, 2048, 2048)) / large == Approx(1006.0 / 1610).epsilon(0.15));
    // 66 x 32 tiles are 16 waves on 132 multiprocessors; one row more is another wave.
    EXPECT(op_seconds(h200, product(8449, 8192, 8192)) > 1.05 * op_seconds(h200, product(8448, 8192, 8192)));
    EXPECT(rate(h200, product(8192, 8192, 64)) < 0.7 * rate(h200, product(8192, 8192, 8192)));
    // A row of a matrix is read in the time of a copy.
    const OpCall row = product(1, 8192, 8192);
    EXPECT(op_seconds(h200, row) == Approx(row.bytes / h200.copy_bytes_per_s + h200.launch_s));
    EXPECT(op_seconds(h200, product(16, 16, 16)) >= h200.launch_s);
    EXPECT_USAGE_ERROR(op_seconds(device("A100"), product(64, 64, 64, DType::e4m3)), "A100 has no FP8");
    EXPECT(rate(h200, product(8192, 8192, 8192, DType::f32)) < 67e12);
    EXPECT(rate(h200, product(8192, 8192, 8192, DType::f64)) ==
           Approx(rate(h200, product(8192, 8192, 8192, DType::f32)) / 2).epsilon(0.01));
}

TEST_CASE("attention by length: cuDNN's figures on an H200") {
    const DeviceModel& h200 = device("H200");
    for (const auto& [tokens, forward, backward] :
         {std::tuple{4096, 591e12, 474e12}, {8192, 644e12, 541e12}, {32768, 688e12, 581e12}}) {
        EXPECT(rate(h200, attention(false, 1, tokens, 64, 8, 128, true)) == Approx(forward).epsilon(0.05));
        EXPECT(rate(h200, attention(true, 1, tokens, 64, 8, 128, true)) == Approx(backward).epsilon(0.05));
    }
    const auto at = [&](int64_t tokens, int64_t heads, int64_t head_dim, bool causal) {
        return rate(h200, attention(false, 1, tokens, heads, heads, head_dim, causal));
    };
    EXPECT(at(1024, 64, 128, true) < at(4096, 64, 128, true));
    EXPECT(at(6000, 64, 128, true) > at(4096, 64, 128, true));
    EXPECT(at(6000, 64, 128, true) < at(8192, 64, 128, true));
    EXPECT(at(4096, 64, 128, false) > at(4096, 64, 128, true));
    EXPECT(at(4096, 64, 64, true) < at(4096, 64, 128, true));
    // Heads of 64: 0.69 and 0.84 of the rate of heads of 128.
    const auto large = [&](bool backward, int64_t head_dim) {
        return rate(h200, attention(backward, 1, 32768, 64, 8, head_dim, true));
    };
    EXPECT(large(false, 64) / large(false, 128) == Approx(0.69).epsilon(0.01));
    EXPECT(large(true, 64) / large(true, 128) == Approx(0.84).epsilon(0.01));
    // A multiprocessor works on 128 rows of a head, even if there are fewer.
    OpCall full = attention(false, 1, 128, 8, 8, 128, true), fewer = full;
    fewer.shape[1] = 100;
    EXPECT(op_seconds(h200, fewer) == op_seconds(h200, full));
    // In fp32 at that of its products, and never faster than its bytes are copied.
    OpCall wide = attention(false, 1, 8192, 64, 64, 128, true);
    wide.dtype = DType::f32;
    EXPECT(rate(h200, wide) < 67e12);
    OpCall one_token = attention(false, 1, 1, 64, 64, 128, true);
    one_token.bytes = 4.3e9;
    EXPECT(op_seconds(h200, one_token) == Approx(1e-3 + h200.launch_s));
    EXPECT(at(1024, 8, 128, true) < 0.6 * at(1024, 64, 128, true));  // 64 groups of rows for 132 multiprocessors
}

TEST_CASE("other ops move bytes; measured ops cost what --bench measured") {
    DeviceModel h100 = device("H100");
    const OpCall norm{.name = "rmsnorm", .dtype = DType::bf16, .bytes = 3e9};
    EXPECT(op_seconds(h100, norm) == Approx(1e-3 + h100.launch_s));
    parse_device_csv(
        "op,calls,ms,floor_ms,share,gflops,gbytes_per_s\n"
        "matmul,15,36.9,0.5,0.77,500000,119.8\n"
        "rmsnorm,2,0.02,0.001,0.0004,0,1500\n"
        "between the ops,,0.28,,0.0059,,\n"
        "whole_step,1,40.2,,1,1.37,\n",
        "--device-csv t.csv", h100);
    EXPECT(h100.measured.size() == 2);
    EXPECT(op_seconds(h100, norm) == Approx(2e-3));
    EXPECT(rate(h100, product(64, 8192, 8192)) == Approx(500e12));
    EXPECT(op_seconds(h100, product(1, 1, 1)) == h100.launch_s);
    EXPECT(op_seconds(h100, {.name = "swiglu", .bytes = 3e9}) == Approx(1e-3 + h100.launch_s));  // not measured
}

TEST_CASE("a program that does not fuse an op: a multiple of its bytes and launches") {
    const ClusterModel cluster = parse_cluster(
        R"({"name": "x", "nodes": 1, "gpus_per_node": 1,
            "device": {"name": "H100", "pointwise_traffic": {"rmsnorm": [9, 8]}}})",
        "--simulate F");
    const double launch_s = cluster.device.launch_s;
    EXPECT(op_seconds(cluster.device, {.name = "rmsnorm", .bytes = 3e9}) == Approx(9e-3 + 8 * launch_s));
    EXPECT(op_seconds(cluster.device, {.name = "swiglu", .bytes = 3e9}) == Approx(1e-3 + launch_s));
    EXPECT(op_seconds(cluster.device, product(64, 64, 64)) == op_seconds(named_devices()[1], product(64, 64, 64)));
}

// ---- files ----------------------------------------------------------------------------------------------------------

TEST_CASE("the clusters of the repository") {
    for (const auto& [file, devices] : std::map<std::string, int64_t>{{"h100-8.json", 8},
                                                                      {"h100-8x8.json", 64},
                                                                      {"h100-32x8.json", 256},
                                                                      {"h100-64x8.json", 512},
                                                                      {"h100-16384.json", 16384},
                                                                      {"h200-8.json", 8},
                                                                      {"b200-8x8.json", 64},
                                                                      {"a100-8.json", 8},
                                                                      {"cpu.json", 64}}) {
        INFO(file);
        const ClusterModel cluster = cluster_of(file);
        EXPECT(cluster.devices() == devices);
        const double seconds = cost(cluster, comm_call("all_reduce", 1 << 20), every(devices)).seconds;
        EXPECT(seconds > 0);
        EXPECT(seconds < 1);
    }
    size_t files = 0;
    for (const auto& entry : std::filesystem::directory_iterator("08_3d_full/clusters"))
        files += entry.path().extension() == ".json";
    EXPECT(files == 9);
    EXPECT(cluster_of("cpu.json").device.streams == false);
    EXPECT(cluster_of("cpu.json").cores == 2);
    EXPECT(resized(cluster_of("h100-8x8.json"), 1024, "--gpus 1024").nodes == 128);
    EXPECT(resized(cluster_of("h100-8x8.json"), 2, "--gpus 2").nodes == 1);
    EXPECT_USAGE_ERROR(resized(cluster_of("cpu.json"), 65, "--gpus 65"), "--gpus 65: ranks on 2 cores has 64 devices");
    EXPECT_USAGE_ERROR(resized(cluster_of("h100-8.json"), 0, "--gpus 0"), "--gpus 0");
}

TEST_CASE("a named device with other figures") {
    const ClusterModel cluster = parse_cluster(
        R"({"name": "x", "device": {"name": "H100", "memory_bytes": 9.4e10, "flops_per_s": 1e14}, "nodes": 1,
            "gpus_per_node": 1})",
        "--simulate x.json");
    EXPECT(cluster.device.memory_bytes == 94e9);
    EXPECT(cluster.device.flops_per_s == 1e14);
    EXPECT(cluster.device.peak_bf16 == device("H100").peak_bf16);
    EXPECT(cluster_of("h100-8.json").device.flops_per_s == Approx(794e12).epsilon(0.001));
}

TEST_CASE("a file that is no cluster: one line with the file, the key and the rule") {
    const std::string good =
        R"("name": "x", "device": "H100", "nodes": 2, "gpus_per_node": 8, "host": {"bytes_per_s": 1e9, "seconds": 0})";
    const std::string link = R"({"bytes_per_s": 1e10, "seconds": 1e-6})", rail = R"(, "rail": )" + link;
    EXPECT(parse_cluster("{" + good + rail + "}", "--simulate F").nodes == 2);
    for (const auto& [text, part] : std::vector<std::pair<std::string, std::string>>{
             {"{" + good + "}", "--simulate F: rail: is missing: 2 nodes"},
             {"[]", "--simulate F: is not an object"},
             {"{", "--simulate F: truncated or corrupt"},
             {"{" + good + R"(, "rail": {"bytes_per_s": 0, "seconds": 1}})",
              "--simulate F: rail.bytes_per_s: must be above 0"},
             {"{" + good + R"(, "rail": {"bytes_per_s": 45, "seconds": 0}})", "rail.bytes_per_s: is in bytes, not GB"},
             {"{" + good + R"(, "rail": {"bytes_per_s": -1, "seconds": 1}})", "rail.bytes_per_s: must be above 0"},
             {"{" + good + R"(, "rail": {"bytes_per_s": 1e-300, "seconds": 1}})",
              "rail.bytes_per_s: must be at least 1e-09"},
             {"{" + good + R"(, "rail": {"bytes_per_s": 1e300, "seconds": 1}})",
              "rail.bytes_per_s: must be above 0 and at most 1e+30"},
             {"{" + good + R"(, "rail": {"bytes_per_s": 1e9}})", "rail.seconds: is missing"},
             {"{" + good + R"(, "rail": {"bytes_per_s": 1e9, "seconds": -1}})", "rail.seconds: must be at least 0"},
             {"{" + good + R"(, "rail": {"bytes_per_s": 1e9, "seconds": 0, "gbps": 1}})",
              "rail.gbps: is no key of the format (name, bytes_per_s, seconds)"},
             {"{" + good + rail + R"(, "gpus": 8})",
              "gpus: is no key of the format (name, device, nodes, gpus_per_node"},
             {"{" + good + rail + R"(, "rails": 0})", "rails: must be an integer from 1"},
             {"{" + good + rail + R"(, "rails": 1.5})", "rails: must be an integer from 1"},
             {"{" + good + rail + R"(, "oversubscription": 0.5})", "oversubscription: must be at least 1"},
             {"{" + good + rail + R"(, "nvls": true})", "nvls: is true without nvlink"},
             {"{" + good + rail + R"(, "nvls": 1})", "nvls: must be true or false"},
             {"{" + good + rail + R"(, "nodes": 1})", "lists \"nodes\" twice"},
             {R"({"name": "x"})", "device: is missing"},
             {R"({"name": "x", "device": "H1000"})", "device: H1000 is not known (A100, H100, H200, B200;"},
             {R"({"name": "x", "device": {"name": "mine"}})", "device.peak_bf16: is missing"},
             {R"({"name": "x", "device": {"name": "H100", "peak_bf16": 0}})", "device.peak_bf16: must be above 0"},
             {R"({"name": "x", "device": {"name": "H100", "product_efficiency": 2}})",
              "device.product_efficiency: must be above 0 and at most 1"},
             {R"({"name": "x", "device": {"name": "H100", "attention": [[2, 1, 1], [1, 1, 1]]}})",
              "device.attention[1]: must have more tokens"},
             {R"({"name": "x", "device": {"name": "H100", "pointwise_traffic": [1]}})",
              "device.pointwise_traffic: must be an object of ops"},
             {R"({"name": "x", "device": {"name": "H100", "pointwise_traffic": {"add": 2}}})",
              "device.pointwise_traffic.add: must be [bytes, kernels]"},
             {R"({"name": "x", "device": {"name": "H100", "pointwise_traffic": {"add": [0, 1]}}})",
              "device.pointwise_traffic.add: must be above 0"},
             {R"({"name": "x", "device": {"name": "H100", "pointwise_traffic": {"add": [1, 0]}}})",
              "device.pointwise_traffic.add: must be at least 1"},
             {R"({"name": "x", "device": {"name": "H100", "pointwise_traffic": {"matmul": [2, 1]}}})",
              "device.pointwise_traffic.matmul: is not for products"},
             {R"({"name": "x", "device": "H100", "nodes": 1, "gpus_per_node": 2})",
              "nvlink: is missing, and host: 2 devices in a node"},
             {R"({"name": "x", "device": "H100", "nodes": 1, "gpus_per_node": 1, "rails": 2})",
              "rails: is given without rail"},
             {R"({"name": "x", "device": "H100", "nodes": 1000000, "gpus_per_node": 8, "rail": )" + link + "}",
              "nodes: 1000000 nodes of 8 devices are more than 1000000"},
         }) {
        INFO(text);
        EXPECT_USAGE_ERROR(parse_cluster(text, "--simulate F"), part.c_str());
    }
    EXPECT_USAGE_ERROR(read_cluster("nowhere.json", "--simulate"), "--simulate nowhere.json: cannot be read");
}

TEST_CASE("a file that --bench did not write: one line with the file, the line and the rule") {
    const std::string header = "op,calls,ms,floor_ms,share,gflops,gbytes_per_s\n";
    for (const auto& [text, part] : std::vector<std::pair<std::string, std::string>>{
             {"", "--device-csv F: line 1: must be op,calls"},
             {"op,calls\n", "line 1: must be op,calls"},
             {header, "--device-csv F: has no op"},
             {header + "whole_step,1,40.2,,1,1.37,\n", "has no op"},
             {header + "matmul,1,1\n", "line 2: has 3 cells, not 7"},
             {header + "matmul,1,1,1,1,1,1\n\nadd,1,1,1,1,0,1\n", "line 3: has 1 cells, not 7"},
             {header + ",1,1,1,1,1,1\n", "line 2: has no op"},
             {header + "matmul,1,1,1,1,fast,1\n", "line 2: gflops \"fast\" must be a number at least 0"},
             {header + "matmul,1,1,1,1,1 ,1\n", "line 2: gflops"},
             {header + "matmul,1,1,1,1,nan,1\n", "line 2: gflops"},
             {header + "matmul,1,1,1,1,inf,1\n", "line 2: gflops"},
             {header + "add,1,1,1,1,0,-1\n", "line 2: gbytes_per_s \"-1\" must be"},
             {header + "add,1,1,1,1,0,0\n", "line 2: add has neither gflops nor gbytes_per_s above 0"},
             {header + "add,1,1,1,1,,\n", "line 2: add has neither"},
             {header + "add,1,1,1,1,0,1\nadd,1,1,1,1,0,1\n", "line 3: add is there twice"},
         }) {
        INFO(text);
        DeviceModel h100 = device("H100");
        EXPECT_USAGE_ERROR(parse_device_csv(text, "--device-csv F", h100), part.c_str());
        EXPECT(h100.measured.empty());
    }
    DeviceModel h100 = device("H100");
    EXPECT_USAGE_ERROR(read_device_csv("nowhere.csv", "--device-csv", h100),
                       "--device-csv nowhere.csv: cannot be read");
}
