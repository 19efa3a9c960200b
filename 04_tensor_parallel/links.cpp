#include "04_tensor_parallel/links.h"

#include "01_single_gpu/io/json.h"
#include "04_tensor_parallel/traffic.h"

namespace train70b {

Links read_links(const std::string& path) {
    const nlohmann::json file = read_json(path, "--links " + path, "04_tensor_parallel/links.json shows the form");
    if (!file.is_object())
        usage_error("--links {}: is no JSON object; 04_tensor_parallel/links.json shows the form", path);
    const auto positive = [&](const nlohmann::json& entry, const std::string& where, const char* key) {
        const nlohmann::json value = entry.is_object() ? entry.value(key, nlohmann::json()) : nlohmann::json();
        if (!value.is_number() || !(value.get<double>() > 0))
            usage_error("--links {}: {}: \"{}\" must be a number above 0", path, where, key);
        return value.get<double>();
    };
    const auto name = [](const nlohmann::json& entry) {
        const auto found = entry.find("name");
        return found != entry.end() && found->is_string() ? found->get<std::string>() : std::string("?");
    };
    Links links;
    const nlohmann::json device = file.value("device", nlohmann::json::object());
    links.flops_per_s = positive(device, "\"device\"", "flops_per_s");
    links.device = name(device);
    const nlohmann::json list = file.value("links", nlohmann::json());
    if (!list.is_array() || list.empty()) usage_error("--links {}: \"links\" must be a list of links", path);
    for (size_t i = 0; i < list.size(); ++i) {
        const std::string where = fmt::format("links[{}]", i);
        const double bytes_per_s = positive(list[i], where, "bytes_per_s");
        links.links.push_back({name(list[i]), bytes_per_s, positive(list[i], where, "seconds")});
    }
    return links;
}

double efficiency(const LlamaConfig& c, int64_t seq_len, int64_t tp, const Links& links, const Links::Link& link) {
    const double products = 6.0 * double(c.block_matrices()), attention = 6.0 * double(c.q_width() * seq_len);
    const double compute = (products + attention) * double(seq_len) / (double(tp) * links.flops_per_s);
    const Traffic traffic =
        layer_traffic(c, {.rows = seq_len, .tp = tp, .dtype = DType::bf16, .grad_dtype = DType::f32});
    const double messages = 4 * 2 * double(tp - 1);  // of 4 ring all-reduces
    return compute / (compute + double(traffic.bytes()) / link.bytes_per_s + messages * link.seconds);
}

namespace {
constexpr int64_t kSeqLen = 8192, kRanks[] = {2, 4, 8, 16};
constexpr const char* kModels[] = {"8b", "70b", "405b"};
constexpr const char* kQuoted[] = {"95-98%", "90-95%", "80-90%", "60-75%"};  // of kRanks
}  // namespace

Table efficiency_table(const Links& links) {
    std::vector<Column> columns = {""};
    for (const Links::Link& link : links.links) columns.push_back(link.name);
    columns.push_back("often quoted");
    Table table(fmt::format("estimated: share of the time in which a rank computes ({} at {:.0f} TFLOP/s, one sequence "
                            "of {}, nothing overlapped)",
                            links.device, links.flops_per_s / 1e12, kSeqLen),
                columns);
    for (const char* model : kModels)
        for (size_t i = 0; i < std::size(kRanks); ++i) {
            std::vector<Cell> cells = {fmt::format("{}, tp {}", model, kRanks[i])};
            for (const Links::Link& link : links.links)
                cells.push_back(percent(efficiency(preset(model), kSeqLen, kRanks[i], links, link), 0));
            cells.push_back(kQuoted[i]);
            table.row(cells);
        }
    table.note(
        "often quoted: for large models over NVLink, part of the communication overlapped; no source is known. "
        "Most nodes have 8 GPUs");
    return table;
}

Table efficiency_rows(const Links& links) {
    Table table("", {"model", "seq_len", "tp", "link", "efficiency"});
    for (const char* model : kModels)
        for (const int64_t tp : kRanks)
            for (const Links::Link& link : links.links)
                table.row({model, kSeqLen, tp, link.name,
                           fmt::format("{:.4f}", efficiency(preset(model), kSeqLen, tp, links, link))});
    return table;
}

}  // namespace train70b
