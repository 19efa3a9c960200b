#pragma once
// What the links between ranks make of tensor parallelism: an estimate, no measurement.
#include "01_single_gpu/config.h"
#include "01_single_gpu/io/table.h"

namespace train70b {

// A table that the reader can edit: 04_tensor_parallel/links.json.
struct Links {
    struct Link {
        std::string name;
        double bytes_per_s, seconds;
    };
    std::string device;
    double flops_per_s = 0;
    std::vector<Link> links;
};
Links read_links(const std::string& path);  // usage error, naming file and entry
// Of a block: computation / (computation + communication), nothing overlapped.
double efficiency(const LlamaConfig& config, int64_t seq_len, int64_t tp, const Links& links, const Links::Link& link);

Table efficiency_table(const Links& links);  // of 8b, 70b and 405b: a row per model and tp, a column per link
Table efficiency_rows(const Links& links);   // the same, a row per link as well: for CSV

}  // namespace train70b
