#include "01_single_gpu/complete/report/report.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "01_single_gpu/complete/muon.h"
#include "01_single_gpu/core/json.h"

namespace train70b {

using nlohmann::ordered_json;

void Metrics::open(const std::string& path, bool append) {
    if (path.empty() || this_rank != 0) return;
    path_ = path;
    const std::string target = output_target("--metrics", path);
    std::error_code error;
    if (append && std::filesystem::is_regular_file(target, error)) {  // a killed run may have left half a line
        std::ifstream lines(target, std::ios::binary);
        int64_t complete = 0;
        for (std::string line; std::getline(lines, line) && !lines.eof();) complete += int64_t(line.size()) + 1;
        std::filesystem::resize_file(target, uintmax_t(complete), error);
    }
    stream_ = std::fopen(target.c_str(), append ? "a" : "w");
    if (!stream_)
        usage_error("--metrics {}: cannot be written: {} (must be in an existing, writable folder)", path,
                    std::strerror(errno));
    std::setvbuf(stream_, nullptr, _IONBF, 0);  // what fails to be written is not kept for a second attempt
}

Metrics::~Metrics() {
    if (stream_) std::fclose(stream_);
}

void Metrics::write(const ordered_json& line) {
    if (!stream_) return;
    const std::string text = json_text(line) + "\n";
    const long whole_lines = std::ftell(stream_);
    if (std::fwrite(text.data(), 1, text.size(), stream_) == text.size()) return;
    const std::string why = std::strerror(errno);
    if (whole_lines >= 0 && ::ftruncate(::fileno(stream_), whole_lines) != 0) {}  // a device has no length
    const std::string from =
        line.contains("step") ? fmt::format("from step {} on", line["step"].dump()) : "of the rest";
    warn(fmt::format("--metrics {}: write failed ({}); metrics {} are missing, and the run goes on", path_, why, from));
    std::fclose(std::exchange(stream_, nullptr));
}

Table memory_table(const LlamaConfig& config, const Llama::Options& options, int64_t micro_batch, int64_t seq_len,
                   const MemoryPeak& peak, const std::string& optimizer) {
    const int64_t n = config.parameters(), weight = size_of(options.dtype), grad = size_of(options.grad_dtype);
    const int64_t state = AdamW::state_bytes(options.dtype);
    const ActivationFormula act =
        activation_formula(config, micro_batch, seq_len, options.dtype, options.recompute,
                           {.loss_chunk = options.loss_chunk, .recompute_every = options.recompute_every});
    Table table("", {"peak bytes", "measured", "formula", Column("formula").left()});
    const auto row = [&](Memory kind, const Cell& expected, const std::string& text) {
        table.row({kMemoryNames[int(kind)], peak.kind[size_t(kind)], expected, text});
    };
    row(Memory::params, weight * n, fmt::format("{} N, N = {} parameters", weight, n));
    row(Memory::grads, grad * n, fmt::format("{} N", grad));
    const int64_t moment = size_of(stats_dtype(options.dtype)), m = optimizer == "muon" ? muon_elements(config) : 0;
    row(Memory::optimizer, state * n - moment * m,
        fmt::format("{} N{}: exp_avg, exp_avg_sq{}{} in {}", state, m > 0 ? fmt::format(" - {} M", moment) : "",
                    m > 0 ? fmt::format(" (not for Muon's M = {})", m) : "",
                    master_bytes(options.dtype) ? ", master" : "", name_of(stats_dtype(options.dtype))));
    row(Memory::activations, act.total,
        fmt::format("{} blocks x {} + {} + working set {}", config.layers, act.block, act.fixed, act.working));
    row(Memory::workspace, "-", "depends on the device");
    table.row({"total", peak.total, "-", fmt::format("peak of the sum ({})", human_bytes(double(peak.total)))});
    return table;
}

Table memory_table(const std::string& caption, const std::vector<MemoryRow>& rows) {
    int kinds = kDeviceMemoryKinds;
    for (const MemoryRow& row : rows)
        while (kinds < kMemoryKinds && row.peak.kind[kinds] > 0) ++kinds;
    std::vector<Column> columns = {""};
    columns.insert(columns.end(), kMemoryNames.begin(), kMemoryNames.begin() + kinds);
    columns.push_back("total");
    Table table(caption, columns);
    for (const MemoryRow& row : rows) {
        std::vector<Cell> measured = {row.name}, formula = {""};
        for (int i = 0; i < kinds; ++i) {
            measured.push_back(row.peak.kind[i]);
            formula.push_back(row.formula[i] < 0 ? Cell() : Cell(row.formula[i]));
        }
        measured.push_back(row.peak.total);
        table.row(measured);
        if (row.formula != kNoFormula) table.row(formula);
    }
    return table;
}

}  // namespace train70b
