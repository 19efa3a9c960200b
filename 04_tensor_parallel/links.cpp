#include "04_tensor_parallel/links.h"

#include "04_tensor_parallel/traffic.h"

namespace train70b {

double efficiency(const LlamaConfig& c, int64_t seq_len, int64_t tp, double flops_per_s,
                  const ClusterModel::Link& link) {
    const double products = 6.0 * double(c.block_matrices()), attention = 6.0 * double(c.q_width() * seq_len);
    const double compute = (products + attention) * double(seq_len) / (double(tp) * flops_per_s);
    const Traffic traffic =
        layer_traffic(c, {.rows = seq_len, .tp = tp, .dtype = DType::bf16, .grad_dtype = DType::f32});
    const double messages = 4 * 2 * double(tp - 1);  // of 4 ring all-reduces
    return compute / (compute + double(traffic.bytes()) / link.bytes_per_s + messages * link.seconds);
}

namespace {
constexpr int64_t kSeqLen = 8192, kRanks[] = {2, 4, 8, 16};
constexpr const char* kModels[] = {"8b", "70b", "405b"};
}  // namespace

std::vector<ClusterModel::Link> links_of(const ClusterModel& cluster) {
    std::vector<ClusterModel::Link> links;
    for (const ClusterModel::Link& link : {cluster.nvlink, cluster.host, cluster.rail})
        if (link.bytes_per_s > 0) links.push_back(link);
    return links;
}

Table efficiency_table(const ClusterModel& cluster) {
    const std::vector<ClusterModel::Link> links = links_of(cluster);
    std::vector<Column> columns = {""};
    for (const ClusterModel::Link& link : links) columns.push_back(link.name);
    Table table(fmt::format("estimated: share of the time in which a rank computes ({}, bf16 at {:.0f} TFLOP/s, one "
                            "sequence of {}, nothing overlapped)",
                            cluster.device.name, cluster.device.flops_per_s / 1e12, kSeqLen),
                columns);
    for (const char* model : kModels)
        for (const int64_t tp : kRanks) {
            std::vector<Cell> cells = {fmt::format("{}, tp {}", model, tp)};
            for (const ClusterModel::Link& link : links)
                cells.push_back(percent(efficiency(preset(model), kSeqLen, tp, cluster.device.flops_per_s, link), 0));
            table.row(cells);
        }
    return table;
}

Table efficiency_rows(const ClusterModel& cluster) {
    const std::vector<ClusterModel::Link> links = links_of(cluster);
    Table table("", {"model", "seq_len", "tp", "link", "efficiency"});
    for (const char* model : kModels)
        for (const int64_t tp : kRanks)
            for (const ClusterModel::Link& link : links)
                table.row(
                    {model, kSeqLen, tp, link.name,
                     fmt::format("{:.4f}", efficiency(preset(model), kSeqLen, tp, cluster.device.flops_per_s, link))});
    return table;
}

}  // namespace train70b
