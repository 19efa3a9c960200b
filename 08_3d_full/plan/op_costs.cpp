#include "08_3d_full/plan/op_costs.h"

#include <algorithm>
#include <cmath>

#include "01_single_gpu/complete/flags/flags.h"
#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/files.h"
#include "01_single_gpu/core/registry.h"

namespace train70b {

namespace {

// A tile's shape, and what the multiprocessor reaches on it relative to the largest (0.97: cuBLAS on a B200 reaches 95%
// of its rate for 8192^3 at 4096^3, where tiles of 128 x 256 alone would leave 14% idle; 0.8: an assumption).
struct Tile {
    double m, n, rate;
};
constexpr Tile kTiles[] = {{128, 256, 1}, {256, 128, 1}, {128, 128, 0.97}, {64, 128, 0.8}, {128, 64, 0.8}};
constexpr double kBothEnds = 128;  // of a tile: loads before, stores after, as columns of its depth
constexpr double kLarge = 8192;    // a product of this side reaches product_efficiency

// The share of the time in which an m x n x k product multiplies.
double busy(const DeviceModel& device, double m, double n, double k) {
    const double depth = k / (k + kBothEnds);
    if (device.multiprocessors == 0) return depth;
    double best = 0;
    for (const Tile& tile : kTiles) {
        const double tiles = std::ceil(m / tile.m) * std::ceil(n / tile.n), slots = double(device.multiprocessors);
        const double computed = std::ceil(tiles / slots) * slots * tile.m * tile.n;
        best = std::max(best, tile.rate * m * n / computed);
    }
    return best * depth;
}

// FLOP/s of large products.
double large_rate(const DeviceModel& device, DType dtype) {
    switch (dtype) {
        case DType::e4m3:
        case DType::e5m2:
        case DType::u8:
            if (!(device.peak_fp8 > 0)) usage_error("{} has no FP8 products: its peak_fp8 is 0", device.name);
            return device.sustained_fp8 * device.peak_fp8 * device.fp8_efficiency;
        default: return device.sustained * peak_flops(device, dtype) * device.product_efficiency;
    }
}

double product_seconds(const DeviceModel& device, const OpCall& op) {
    double share = 1;
    if (op.shape.size() == 3 && op.flops > 0)
        share = busy(device, double(op.shape[0]), double(op.shape[1]), double(op.shape[2])) /
                busy(device, kLarge, kLarge, kLarge);
    return std::max(op.flops / (large_rate(device, op.dtype) * share), op.bytes / device.copy_bytes_per_s);
}

// `attention` at this many tokens: linear in their logarithm, constant outside.
double attention_rate(const DeviceModel& device, double tokens, bool backward) {
    const auto& rows = device.attention;
    const size_t column = backward ? 2 : 1;
    if (tokens <= rows.front()[0]) return rows.front()[column];
    for (size_t i = 1; i < rows.size(); ++i)
        if (tokens <= rows[i][0]) {
            const double x = std::log(tokens / rows[i - 1][0]) / std::log(rows[i][0] / rows[i - 1][0]);
            return (1 - x) * rows[i - 1][column] + x * rows[i][column];
        }
    return rows.back()[column];
}

double attention_seconds(const DeviceModel& device, const OpCall& op, bool backward) {
    double rate = large_rate(device, op.dtype);
    if (op.shape.size() == 7) {
        const double batch = double(op.shape[0]), rows = double(op.shape[1]), keys = double(op.shape[2]);
        const double heads = double(op.shape[3]), head_dim = double(op.shape[5]);
        const bool causal = op.shape[6] == 1;
        if (!device.attention.empty())  // of bf16; others by the ratio of the products' rates
            rate *= device.sustained * attention_rate(device, causal ? keys : 4 * keys, backward) /
                    large_rate(device, DType::bf16);
        // Heads of 64: 0.69 (forward), 0.84 (backward) of heads of 128, cuDNN on an H100 at 16k (FlashAttention-3).
        if (device.multiprocessors > 0 && head_dim < 128)
            rate *= std::pow(backward ? 0.84 : 0.69, std::log2(128 / std::max(head_dim, 1.0)));
        const double tiles = batch * heads * std::ceil(rows / 128);  // a multiprocessor works on 128 rows of a head
        if (device.multiprocessors > 0) rate *= std::min(1.0, tiles / double(device.multiprocessors));
    }
    return std::max(op.flops / rate, op.bytes / device.copy_bytes_per_s);
}

}  // namespace

double peak_flops(const DeviceModel& device, DType dtype) {
    return dtype == DType::bf16 ? device.peak_bf16 : dtype == DType::f64 ? device.peak_fp32 / 2 : device.peak_fp32;
}

double op_seconds(const DeviceModel& device, const OpCall& op) {
    if (const auto found = device.measured.find(op.name); found != device.measured.end()) {
        const auto [flops_per_s, bytes_per_s] = found->second;
        if (flops_per_s > 0 && op.flops > 0) return std::max(device.launch_s, op.flops / flops_per_s);
        if (bytes_per_s > 0 && op.bytes > 0) return std::max(device.launch_s, op.bytes / bytes_per_s);
    }
    if (op.name == "matmul" || op.name == "scaled_matmul") return device.launch_s + product_seconds(device, op);
    if (op.name == "attention") return device.launch_s + attention_seconds(device, op, false);
    if (op.name == "attention_backward") return device.launch_s + attention_seconds(device, op, true);
    const auto unfused = device.pointwise_traffic.find(op.name);
    const auto [bytes, kernels] = unfused == device.pointwise_traffic.end() ? std::array{1.0, 1.0} : unfused->second;
    return kernels * device.launch_s + bytes * op.bytes / device.copy_bytes_per_s;
}

void parse_device_csv(const std::string& text, const std::string& where, DeviceModel& device) {
    const std::string header = "op,calls,ms,floor_ms,share,gflops,gbytes_per_s";
    std::vector<std::string> lines = items_of(text, '\n');
    for (std::string& line : lines)
        if (line.ends_with('\r')) line.pop_back();
    if (lines[0] != header)
        usage_error("{}: line 1: must be {} (what --bench --bench-csv FILE.csv writes)", where, header);
    if (lines.back().empty()) lines.pop_back();
    std::map<std::string, std::array<double, 2>> rates;
    for (size_t i = 1; i < lines.size(); ++i) {
        const auto refuse = [&](const std::string& problem) { usage_error("{}: line {}: {}", where, i + 1, problem); };
        const std::vector<std::string> cells = items_of(lines[i]);
        if (cells.size() != 7) refuse(fmt::format("has {} cells, not 7", cells.size()));
        const std::string& name = cells[0];
        if (name.empty()) refuse("has no op");
        std::array<double, 2> rate{};
        for (size_t k = 0; k < 2; ++k) {
            const std::string& cell = cells[5 + k];
            if (cell.empty()) continue;
            if (const std::string problem = real_number(0, 1e30).problem(cell); !problem.empty())
                refuse(fmt::format("{} {}", k ? "gbytes_per_s" : "gflops", problem));
            rate[k] = 1e9 * std::strtod(cell.c_str(), nullptr);
        }
        if (name == "between the ops" || name == "whole_step") continue;
        if (!(rate[0] > 0 || rate[1] > 0)) refuse(name + " has neither gflops nor gbytes_per_s above 0");
        if (!rates.emplace(name, rate).second) refuse(name + " is there twice");
    }
    if (rates.empty()) usage_error("{}: has no op", where);
    for (const auto& [name, rate] : rates)
        device.measured[name] = {rate[0], rate[0] > 0 ? 0 : rate[1]};  // FLOPs where the op has them
}

void read_device_csv(const std::string& path, const std::string& flag, DeviceModel& device) {
    const std::string where = flag + " " + path;
    const InputFile file(where, path, "--bench --bench-csv FILE.csv writes one");
    if (file.bytes() > 1 << 20) usage_error("{}: has more than 1 MiB: no table of --bench", where);
    std::string text(size_t(file.bytes()), '\0');
    file.read(0, text.data(), file.bytes());
    parse_device_csv(text, where, device);
}

}  // namespace train70b
