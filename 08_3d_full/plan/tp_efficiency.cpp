#include "08_3d_full/plan/tp_efficiency.h"

#include "04_tensor_parallel/complete/traffic.h"

namespace train70b {

// Of a block: computation / (computation + communication), for one sequence of seq_len tokens in bf16.
static double tp_efficiency(const LlamaConfig& c, int64_t seq_len, int64_t tp, double flops_per_s,
                            const ClusterModel::Link& link) {
    const double products = 6.0 * double(c.block_matrices()), attention = 6.0 * double(c.q_width() * seq_len);
    const double compute = (products + attention) * double(seq_len) / (double(tp) * flops_per_s);
    const Traffic traffic =
        layer_traffic(c, {.rows = seq_len, .tp = tp, .dtype = DType::bf16, .grad_dtype = DType::f32});
    const double messages = 4 * 2 * double(tp - 1);  // of 4 ring all-reduces
    return compute / (compute + double(traffic.bytes()) / link.bytes_per_s + messages * link.seconds);
}

TpEfficiency tp_efficiency_tables(const ClusterModel& cluster, const std::string& where) {
    constexpr int64_t kSeqLen = 8192;
    std::vector<ClusterModel::Link> links = {cluster.nvlink, cluster.host, cluster.rail};
    std::erase_if(links, [](const ClusterModel::Link& link) { return link.bytes_per_s == 0; });
    if (links.empty()) usage_error("{}: has no link (nvlink, host or rail)", where);
    std::vector<Column> columns = {""};
    for (const ClusterModel::Link& link : links) columns.push_back(link.name);
    TpEfficiency tables{
        Table(fmt::format("estimated: share of the time in which a rank computes ({}, bf16 at {:.0f} TFLOP/s, one "
                          "sequence of {}, nothing overlapped)",
                          cluster.device.name, cluster.device.flops_per_s / 1e12, kSeqLen),
              columns),
        Table("", {"model", "seq_len", "tp", "link", "efficiency"})};
    for (const char* model : {"8b", "70b", "405b"})
        for (const int64_t tp : {2, 4, 8, 16}) {
            std::vector<Cell> cells = {fmt::format("{}, tp {}", model, tp)};
            for (const ClusterModel::Link& link : links) {
                const double share = tp_efficiency(preset(model), kSeqLen, tp, cluster.device.flops_per_s, link);
                cells.push_back(percent(share, 0));
                tables.csv.row({model, kSeqLen, tp, link.name, fmt::format("{:.4f}", share)});
            }
            tables.text.row(cells);
        }
    return tables;
}

}  // namespace train70b
