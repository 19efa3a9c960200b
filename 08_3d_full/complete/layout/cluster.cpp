#include "08_3d_full/complete/layout/cluster.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/json.h"

namespace train70b {

namespace {

using nlohmann::json;
constexpr double kLeastBytesPerS = 1e6;        // of a link; a smaller number was meant in another unit
constexpr double kLeast = 1e-9, kMost = 1e30;  // of rates, so that every time is a number
constexpr double kMostRanks = 1e6;             // so that ranks can be counted by int

// An object of the file whose keys are read one by one; what is left at the end is unknown.
class ClusterReader {
  public:
    ClusterReader(const json& object, std::string where, std::string path)
        : object_(object), where_(where), path_(path) {
        if (!object.is_object())
            usage_error("{}: {}", where_,
                        path_.empty() ? std::string("is not an object of a cluster's keys")
                                      : path_.substr(0, path_.size() - 1) + ": must be an object");
        known_.push_back("_");  // a comment
    }

    const json* find(const char* key) {
        if (std::find(known_.begin(), known_.end(), key) == known_.end()) known_.push_back(key);
        const auto found = object_.find(key);
        return found == object_.end() ? nullptr : &*found;
    }
    const json& need(const char* key) {
        const json* found = find(key);
        if (!found) usage_error("{}: {}{}: is missing", where_, path_, key);
        return *found;
    }
    [[noreturn]] void refuse(const std::string& key, const std::string& rule) const {
        usage_error("{}: {}{}: {}", where_, path_, key, rule);
    }

    // Sets `value` if the key is there.
    void number(const char* key, double& value, double min, bool above, double max = kMost) {
        if (const json* found = find(key)) value = as_number(key, *found, min, above, max);
    }
    double as_number(const std::string& key, const json& found, double min, bool above, double max = kMost) const {
        const double x = found.is_number() ? found.get<double>() : NAN;
        if (!(above ? x > min : x >= min) || !(x <= max))
            refuse(key, max == kMost && !(x > max)
                            ? fmt::format("must be {} {}", above ? "above" : "at least", min)
                            : fmt::format("must be {} {} and at most {}", above ? "above" : "at least", min, max));
        if (above && x < kLeast) refuse(key, fmt::format("must be at least {}", kLeast));
        return x;
    }
    void integer(const char* key, int64_t& value, int64_t min, int64_t max) {
        const json* found = find(key);
        if (!found) return;
        if (!found->is_number_integer() || !(found->get<double>() >= double(min)) ||
            !(found->get<double>() <= double(max)))
            refuse(key, fmt::format("must be an integer from {} to {}", min, max));
        value = found->get<int64_t>();
    }
    void boolean(const char* key, bool& value) {
        const json* found = find(key);
        if (!found) return;
        if (!found->is_boolean()) refuse(key, "must be true or false");
        value = found->get<bool>();
    }
    void text(const char* key, std::string& value) {
        const json* found = find(key);
        if (!found) return;
        if (!found->is_string() || found->get<std::string>().empty()) refuse(key, "must be a text");
        value = found->get<std::string>();
    }
    // After the last key.
    void end() const {
        for (const auto& [key, value] : object_.items()) {
            if (std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
            std::string all;
            for (size_t i = 1; i < known_.size(); ++i) all += (i > 1 ? ", " : "") + known_[i];
            refuse(key, fmt::format("is no key of the format ({})", all));
        }
    }

  private:
    const json& object_;
    std::string where_, path_;
    std::vector<std::string> known_;
};

std::string names_of_devices() {
    std::string names;
    for (const DeviceModel& device : named_devices()) names += (names.empty() ? "" : ", ") + device.name;
    return names;
}

DeviceModel read_device(const json& entry, const std::string& where) {
    const auto named = [&](const std::string& name) -> const DeviceModel* {
        for (const DeviceModel& device : named_devices())
            if (device.name == name) return &device;
        return nullptr;
    };
    if (entry.is_string()) {
        if (const DeviceModel* device = named(entry.get<std::string>())) return *device;
        usage_error("{}: device: {} is not known ({}; or an object with its figures)", where, entry.get<std::string>(),
                    names_of_devices());
    }
    ClusterReader reader(entry, where, "device.");
    DeviceModel device;
    reader.need("name");
    reader.text("name", device.name);
    if (const DeviceModel* known = named(device.name))
        device = *known;
    else
        for (const char* key :
             {"peak_bf16", "peak_fp32", "product_efficiency", "copy_bytes_per_s", "memory_bytes", "launch_s", "host_s"})
            reader.need(key);
    for (const auto& [key, value] : {std::pair{"peak_bf16", &device.peak_bf16},
                                     {"peak_fp32", &device.peak_fp32},
                                     {"copy_bytes_per_s", &device.copy_bytes_per_s},
                                     {"memory_bytes", &device.memory_bytes},
                                     {"flops_per_s", &device.flops_per_s}})
        reader.number(key, *value, 0, true);
    reader.number("peak_fp8", device.peak_fp8, 0, false);
    reader.number("product_efficiency", device.product_efficiency, 0, true, 1);
    reader.number("fp8_efficiency", device.fp8_efficiency, 0, true, 1);
    if (device.copy_bytes_per_s < kLeastBytesPerS)
        reader.refuse("copy_bytes_per_s", "is in bytes, not GB: less than 1 MB/s");
    if (device.memory_bytes > 0 && device.memory_bytes < 1e6)
        reader.refuse("memory_bytes", "is in bytes, not GB: less than 1 MB");
    reader.number("sustained", device.sustained, 0, true, 1);
    reader.number("sustained_fp8", device.sustained_fp8, 0, true, 1);
    if (device.peak_fp8 > 0 && !(device.fp8_efficiency > 0)) reader.refuse("fp8_efficiency", "is missing");
    reader.number("launch_s", device.launch_s, 0, false, 1);
    reader.number("host_s", device.host_s, 0, false, 1);
    reader.integer("multiprocessors", device.multiprocessors, 0, 100000);
    reader.boolean("streams", device.streams);
    if (const json* list = reader.find("attention")) {
        if (!list->is_array() || list->empty() || list->size() > 100)
            reader.refuse("attention", "must be a list of [tokens, forward, backward]");
        device.attention.clear();
        for (const json& row : *list) {
            const std::string key = fmt::format("attention[{}]", device.attention.size());
            if (!row.is_array() || row.size() != 3) reader.refuse(key, "must be [tokens, forward, backward]");
            std::array<double, 3> numbers{};
            for (size_t i = 0; i < 3; ++i) numbers[i] = reader.as_number(key, row[i], 0, true);
            if (!device.attention.empty() && !(numbers[0] > device.attention.back()[0]))
                reader.refuse(key, "must have more tokens than the row before");
            device.attention.push_back(numbers);
        }
    }
    if (const json* ops = reader.find("pointwise_traffic")) {
        if (!ops->is_object()) reader.refuse("pointwise_traffic", "must be an object of ops");
        device.pointwise_traffic.clear();
        for (const auto& [op, entry] : ops->items()) {
            const std::string key = "pointwise_traffic." + op;
            for (const char* other : {"matmul", "scaled_matmul", "grouped_matmul", "attention", "attention_backward"})
                if (op == other) reader.refuse(key, "is not for products and attention");
            if (!entry.is_array() || entry.size() != 2)
                reader.refuse(key, "must be [bytes, kernels], in multiples of one op's");
            device.pointwise_traffic[op] = {reader.as_number(key, entry[0], 0, true, 1000),
                                            reader.as_number(key, entry[1], 1, false, 1000)};
        }
    }
    reader.end();
    return device;
}

void read_link(ClusterReader& reader, const char* key, const std::string& where, ClusterModel::Link& link) {
    const json* found = reader.find(key);
    if (!found) return;
    ClusterReader fields(*found, where, fmt::format("{}.", key));
    link.name = key;
    fields.text("name", link.name);
    fields.need("bytes_per_s");
    fields.number("bytes_per_s", link.bytes_per_s, 0, true);
    if (link.bytes_per_s < kLeastBytesPerS) fields.refuse("bytes_per_s", "is in bytes, not GB: less than 1 MB/s");
    fields.need("seconds");
    fields.number("seconds", link.seconds, 0, false, 1);
    fields.end();
}

ClusterModel from_json(const json& file, const std::string& where) {
    ClusterReader reader(file, where, "");
    ClusterModel cluster;
    reader.need("name");
    reader.text("name", cluster.name);
    cluster.device = read_device(reader.need("device"), where);
    reader.need("nodes");
    reader.integer("nodes", cluster.nodes, 1, int64_t(kMostRanks));
    reader.need("gpus_per_node");
    reader.integer("gpus_per_node", cluster.gpus_per_node, 1, int64_t(kMostRanks));
    if (double(cluster.nodes) * double(cluster.gpus_per_node) > kMostRanks)
        reader.refuse("nodes", fmt::format("{} nodes of {} devices are more than {:.0f}", cluster.nodes,
                                           cluster.gpus_per_node, kMostRanks));
    read_link(reader, "nvlink", where, cluster.nvlink);
    reader.boolean("nvls", cluster.nvls);
    read_link(reader, "rail", where, cluster.rail);
    cluster.rails = cluster.gpus_per_node;
    reader.integer("rails", cluster.rails, 1, 1000);
    reader.number("oversubscription", cluster.oversubscription, 1, false, 1000);
    read_link(reader, "host", where, cluster.host);
    reader.integer("cores", cluster.cores, 1, 100000);
    reader.end();
    const bool nvlink = cluster.nvlink.bytes_per_s > 0, rail = cluster.rail.bytes_per_s > 0;
    if (cluster.nodes > 1 && !rail) reader.refuse("rail", fmt::format("is missing: {} nodes", cluster.nodes));
    if (cluster.gpus_per_node > 1 && !nvlink && !(cluster.host.bytes_per_s > 0))
        reader.refuse("nvlink", fmt::format("is missing, and host: {} devices in a node", cluster.gpus_per_node));
    if (cluster.nvls && !nvlink) reader.refuse("nvls", "is true without nvlink");
    if (!rail)
        for (const char* key : {"rails", "oversubscription"})
            if (file.contains(key)) reader.refuse(key, "is given without rail");
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
    if (devices < 1 || double(devices) > kMostRanks)
        usage_error("{}: must be from 1 to {}", where, int64_t(kMostRanks));
    cluster.nodes = (devices + cluster.gpus_per_node - 1) / cluster.gpus_per_node;
    if (cluster.nodes > 1 && !(cluster.rail.bytes_per_s > 0))
        usage_error("{}: {} has {} devices in a node and no rail between nodes", where, cluster.name,
                    cluster.gpus_per_node);
    return cluster;
}

}  // namespace train70b
