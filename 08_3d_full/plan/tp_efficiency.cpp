#include "08_3d_full/plan/tp_efficiency.h"

#include "04_tensor_parallel/complete/traffic.h"

namespace train70b {

double tp_efficiency(const LlamaConfig& c, int64_t seq_len, int64_t tp, double flops_per_s,
                     const ClusterModel::Link& link) {
    const double products = 6.0 * double(c.block_matrices()), attention = 6.0 * double(c.q_width() * seq_len);
    const double compute = (products + attention) * double(seq_len) / (double(tp) * flops_per_s);
    const Traffic traffic =
        layer_traffic(c, {.rows = seq_len, .tp = tp, .dtype = DType::bf16, .grad_dtype = DType::f32});
    const double messages = 4 * 2 * double(tp - 1);  // of 4 ring all-reduces
    return compute / (compute + double(traffic.bytes()) / link.bytes_per_s + messages * link.seconds);
}

namespace {
constexpr int64_t kSeqLen = 8192;

std::vector<ClusterModel::Link> links_of(const ClusterModel& cluster) {
    std::vector<ClusterModel::Link> links;
    for (const ClusterModel::Link& link : {cluster.nvlink, cluster.host, cluster.rail})
        if (link.bytes_per_s > 0) links.push_back(link);
    return links;
}

// use(the model's name, tp, the share over each link)
template <class Use>
void for_each_layout(const ClusterModel& cluster, const Use& use) {
    for (const char* model : {"8b", "70b", "405b"})
        for (const int64_t tp : {2, 4, 8, 16}) {
            std::vector<double> shares;
            for (const ClusterModel::Link& link : links_of(cluster))
                shares.push_back(tp_efficiency(preset(model), kSeqLen, tp, cluster.device.flops_per_s, link));
            use(model, tp, shares);
        }
}
}  // namespace

Table tp_efficiency_table(const ClusterModel& cluster, const std::string& where) {
    std::vector<Column> columns = {""};
    for (const ClusterModel::Link& link : links_of(cluster)) columns.push_back(link.name);
    if (columns.size() == 1) usage_error("{}: has no link (nvlink, host or rail)", where);
    Table table(fmt::format("estimated: share of the time in which a rank computes ({}, bf16 at {:.0f} TFLOP/s, one "
                            "sequence of {}, nothing overlapped)",
                            cluster.device.name, cluster.device.flops_per_s / 1e12, kSeqLen),
                columns);
    for_each_layout(cluster, [&](const char* model, int64_t tp, const std::vector<double>& shares) {
        std::vector<Cell> cells = {fmt::format("{}, tp {}", model, tp)};
        for (const double share : shares) cells.push_back(percent(share, 0));
        table.row(cells);
    });
    return table;
}

Table tp_efficiency_rows(const ClusterModel& cluster) {
    Table table("", {"model", "seq_len", "tp", "link", "efficiency"});
    const std::vector<ClusterModel::Link> links = links_of(cluster);
    for_each_layout(cluster, [&](const char* model, int64_t tp, const std::vector<double>& shares) {
        for (size_t i = 0; i < links.size(); ++i)
            table.row({model, kSeqLen, tp, links[i].name, fmt::format("{:.4f}", shares[i])});
    });
    return table;
}

}  // namespace train70b
