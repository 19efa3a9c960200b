#pragma once
// Clusters, calls and ops whose costs are tested.
#include <filesystem>
#include <numeric>

#include "08_3d_full/plan/network.h"
#include "tests/support.h"

namespace train70b::test {

// Relative: doctest's own adds 1 to the numbers, which leaves room for 12 microseconds.
inline doctest::Approx Approx(double number) { return doctest::Approx(number).scale(0); }

inline ClusterModel cluster_of(const std::string& name) {
    return read_cluster("08_3d_full/plan/clusters/" + name, "--simulate");
}

// Nodes of 8 with a ring of 400 GB/s, 8 rails of 50 GB/s, and no NVLS.
inline ClusterModel by_hand(int64_t nodes, int64_t rails = 8) {
    return {.name = "by hand",
            .device = named_devices()[1],
            .nodes = nodes,
            .gpus_per_node = 8,
            .nvlink = {400e9, 2e-6, "NVLink"},
            .rail = {50e9, 10e-6, "network"},
            .rails = rails,
            .host = {20e9, 5e-6, "host"}};
}

inline std::vector<int64_t> every(int64_t count, int64_t stride = 1, int64_t first = 0) {
    std::vector<int64_t> ranks(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) ranks[size_t(i)] = first + i * stride;
    return ranks;
}

inline CommCall comm_call(const std::string& operation, double bytes) {
    return {.operation = operation, .bytes = int64_t(bytes)};
}

struct Cost {
    Transfer transfer;
    double seconds;
    double latency() const { return transfer.latency_s; }
    double moving() const { return seconds - transfer.latency_s; }
};
inline Cost cost(const ClusterModel& cluster, const CommCall& call, const std::vector<int64_t>& members,
                 int64_t sender = 0) {
    const Network network(cluster, cluster.devices());
    const Transfer transfer = network.transfer(call, members, sender);
    return {transfer, network.seconds_alone(transfer)};
}

inline std::map<std::string, double> named(const ClusterModel& cluster, const Transfer& transfer) {
    const Network network(cluster, cluster.devices());
    std::map<std::string, double> loads;
    for (const auto& [link, bytes] : transfer.loads) EXPECT(loads.emplace(network.name(link), bytes).second);
    EXPECT(std::is_sorted(transfer.loads.begin(), transfer.loads.end()));
    return loads;
}

// One op at a time, so that the device stays cool.
inline const DeviceModel& device(const std::string& name) {
    static std::map<std::string, DeviceModel> cool;
    for (const DeviceModel& candidate : named_devices()) {
        if (candidate.name != name) continue;
        DeviceModel& device = cool[name] = candidate;
        device.sustained = device.sustained_fp8 = 1;
        return device;
    }
    throw std::logic_error("no device " + name);
}

inline OpCall product(int64_t m, int64_t n, int64_t k, DType dtype = DType::bf16) {
    const double size = double(size_of(dtype));
    return {.name = dtype == DType::e4m3 ? "scaled_matmul" : "matmul",
            .shape = {m, n, k},
            .dtype = dtype,
            .flops = 2.0 * double(m) * double(n) * double(k),
            .bytes = size * (double(m) * double(k) + double(n) * double(k)) + 2 * double(m) * double(n)};
}
inline OpCall attention(bool backward, int64_t batch, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
                        bool causal) {
    const double pairs = causal ? double(tokens) * double(tokens + 1) / 2 : double(tokens) * double(tokens);
    const double passes = backward ? 3 : 1;
    return {.name = backward ? "attention_backward" : "attention",
            .shape = {batch, tokens, tokens, heads, kv_heads, head_dim, causal},
            .dtype = DType::bf16,
            .flops = (backward ? 10 : 4) * pairs * double(batch * heads * head_dim),
            .bytes = passes * 2 * double(batch * tokens * (2 * heads + 2 * kv_heads) * head_dim)};
}
inline double rate(const DeviceModel& on, const OpCall& op) { return op.flops / op_seconds(on, op); }

}  // namespace train70b::test
