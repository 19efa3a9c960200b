#include "08_3d_full/complete/layout/cluster.h"

#include <algorithm>

#include "01_single_gpu/core/json.h"
#include "01_single_gpu/core/json_object.h"
#include "01_single_gpu/core/registry.h"

namespace train70b {

namespace {

using nlohmann::json;
constexpr double kLeastBytes = 1e6;            // of a memory, and of a second; a smaller number is in another unit
constexpr double kLeast = 1e-9, kMost = 1e30;  // of rates, so that every time is a number
constexpr int64_t kMostRanks = 1'000'000;      // so that ranks can be counted by int

// `row`, one of the key's, as N numbers above 0.
template <size_t N>
std::array<double, N> numbers_of(const JsonObject& keys, const char* key, const json& row, const std::string& rule) {
    std::array<double, N> numbers{};
    if (!row.is_array() || row.size() != N) keys.refuse(key, rule);
    for (size_t i = 0; i < N; ++i) {
        if (row[i].is_number()) numbers[i] = row[i].get<double>();
        if (!(numbers[i] >= kLeast && numbers[i] <= kMost)) keys.refuse(key, rule);
    }
    return numbers;
}

DeviceModel read_device(const JsonObject& cluster, const std::string& where) {
    const std::vector<DeviceModel>& named = named_devices();
    if (cluster.has("device") && cluster.json()["device"].is_string())
        return find_entry(named, where + ": device", cluster.text("device"));
    const JsonObject keys = cluster.inner("device");
    const std::string name = keys.text("name");
    const auto known = std::ranges::find(named, name, &DeviceModel::name);
    const bool is_new = known == named.end();  // it must have the figures that have no default
    DeviceModel device = is_new ? DeviceModel{.name = name} : *known;
    struct Figure {
        const char* key;
        double& value;
        double min, max;
        bool needed = false;
    };
    for (const Figure& figure : std::initializer_list<Figure>{
             {"peak_bf16", device.peak_bf16, kLeast, kMost, is_new},
             {"peak_fp32", device.peak_fp32, kLeast, kMost, is_new},
             {"peak_fp8", device.peak_fp8, 0, kMost},
             {"product_efficiency", device.product_efficiency, kLeast, 1, is_new},
             {"fp8_efficiency", device.fp8_efficiency, kLeast, 1},
             {"sustained", device.sustained, kLeast, 1},
             {"sustained_fp8", device.sustained_fp8, kLeast, 1},
             {"flops_per_s", device.flops_per_s, kLeast, kMost},
             {"copy_bytes_per_s", device.copy_bytes_per_s, kLeastBytes, kMost, is_new},
             {"memory_bytes", device.memory_bytes, kLeastBytes, kMost, is_new},
             {"launch_s", device.launch_s, 0, 1, is_new},
             {"host_s", device.host_s, 0, 1, is_new},
         })
        if (figure.needed || keys.has(figure.key)) figure.value = keys.real(figure.key, figure.min, figure.max);
    if (device.peak_fp8 > 0 && !(device.fp8_efficiency > 0)) keys.refuse("fp8_efficiency", "is missing");
    if (keys.has("multiprocessors")) device.multiprocessors = keys.integer("multiprocessors", 100000, 0);
    device.streams = keys.flag("streams", device.streams);
    if (keys.has("attention")) {
        const std::string rule = "must be a list of [tokens, forward, backward], of ascending tokens";
        device.attention.clear();
        for (const json& row : keys.list("attention")) {
            const std::array<double, 3> numbers = numbers_of<3>(keys, "attention", row, rule);
            if (!device.attention.empty() && !(numbers[0] > device.attention.back()[0])) keys.refuse("attention", rule);
            device.attention.push_back(numbers);
        }
        if (device.attention.empty() || device.attention.size() > 100) keys.refuse("attention", rule);
    }
    if (keys.has("pointwise_traffic")) {
        const JsonObject ops = keys.inner("pointwise_traffic");
        device.pointwise_traffic.clear();
        for (const auto& [op, row] : ops.json().items()) {
            for (const char* other : {"matmul", "scaled_matmul", "grouped_matmul", "attention", "attention_backward"})
                if (op == other) ops.refuse(other, "is not for products and attention");
            const std::string rule =
                "must be [bytes, kernels], in multiples of one op's, at least 1 kernel, at most 1000";
            const auto [bytes, kernels] = numbers_of<2>(ops, op.c_str(), row, rule);
            if (bytes > 1000 || kernels < 1 || kernels > 1000) ops.refuse(op.c_str(), rule);
            device.pointwise_traffic[op] = {bytes, kernels};
        }
    }
    keys.refuse_others();
    return device;
}

ClusterModel::Link read_link(const JsonObject& cluster, const char* key) {
    if (!cluster.has(key)) return {};
    const JsonObject keys = cluster.inner(key);
    const ClusterModel::Link link{keys.real("bytes_per_s", kLeastBytes, kMost), keys.real("seconds", 0, 1),
                                  keys.has("name") ? keys.text("name") : key};
    keys.refuse_others();
    return link;
}

ClusterModel from_json(const json& file, const std::string& where) {
    const JsonObject keys(where, file);
    ClusterModel cluster{.name = keys.text("name"), .device = read_device(keys, where)};
    if (cluster.name.empty()) keys.refuse("name", "must not be empty");
    cluster.nodes = keys.integer("nodes", kMostRanks);
    cluster.gpus_per_node = keys.integer("gpus_per_node", kMostRanks);
    if (cluster.devices() > kMostRanks)
        keys.refuse("nodes", fmt::format("of {} devices: more than {}", cluster.gpus_per_node, kMostRanks));
    cluster.nvlink = read_link(keys, "nvlink");
    cluster.nvls = keys.flag("nvls", false);
    cluster.rail = read_link(keys, "rail");
    cluster.rails = keys.has("rails") ? keys.integer("rails", 1000) : cluster.gpus_per_node;
    if (keys.has("oversubscription")) cluster.oversubscription = keys.real("oversubscription", 1, 1000);
    cluster.host = read_link(keys, "host");
    if (keys.has("cores")) cluster.cores = keys.integer("cores", 100000);
    cluster.one_machine = keys.flag("one_machine", false);
    keys.refuse_others();
    const bool nvlink = cluster.nvlink.bytes_per_s > 0, rail = cluster.rail.bytes_per_s > 0;
    if (cluster.nodes > 1 && !rail) keys.refuse("rail", fmt::format("is missing: {} nodes", cluster.nodes));
    if (cluster.gpus_per_node > 1 && !nvlink && !(cluster.host.bytes_per_s > 0))
        keys.refuse("nvlink", fmt::format("is missing, and host: {} devices in a node", cluster.gpus_per_node));
    if (cluster.nvls && !nvlink) keys.refuse("nvls", "needs nvlink");
    if (cluster.one_machine && !cluster.cores) keys.refuse("one_machine", "needs cores");
    for (const char* key : {"rails", "oversubscription"})
        if (!rail && keys.has(key)) keys.refuse(key, "needs rail");
    DeviceModel& device = cluster.device;
    if (device.flops_per_s == 0) device.flops_per_s = device.peak_bf16 * device.product_efficiency;
    return cluster;
}

}  // namespace

ClusterModel parse_cluster(std::string_view text, const std::string& where) {
    return from_json(parse_json(text, where), where);
}

ClusterModel read_cluster(const std::string& path, const std::string& flag) {
    const std::string where = flag + " " + path;
    return from_json(read_json(path, where, "08_3d_full/plan/clusters has examples"), where);
}

ClusterModel resized(ClusterModel cluster, int64_t devices, const std::string& where) {
    if (devices < 1 || devices > kMostRanks) usage_error("{}: must be from 1 to {}", where, kMostRanks);
    cluster.nodes = (devices + cluster.gpus_per_node - 1) / cluster.gpus_per_node;
    if (cluster.nodes > 1 && !(cluster.rail.bytes_per_s > 0))
        usage_error("{}: {} has {} devices in a node and no rail between nodes", where, cluster.name,
                    cluster.gpus_per_node);
    return cluster;
}

}  // namespace train70b
