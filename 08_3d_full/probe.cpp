#include "08_3d_full/probe.h"

#include <algorithm>

#include "01_single_gpu/io/bench.h"
#include "02_data_parallel/runtime/measure.h"

namespace train70b {

namespace {

constexpr int kCalls = 5;

void add_row(Table& table, const std::string& name, const std::string& unit, const std::vector<double>& of_rank) {
    constexpr double kOutlier = 0.8;  // of the median
    std::vector<double> rates;
    for (const double rate : of_rank)
        if (rate > 0) rates.push_back(rate);
    if (rates.empty()) return;
    const double middle = median(rates);
    const auto [least, most] = std::minmax_element(rates.begin(), rates.end());
    const auto slowest = std::min_element(of_rank.begin(), of_rank.end());
    std::string outlier;
    if (*slowest < kOutlier * middle)
        outlier =
            fmt::format("rank {} is slow: {:.0f}% of the median", slowest - of_rank.begin(), 100 * *slowest / middle);
    table.row({name, fixed(*least, 2), fixed(middle, 2), fixed(*most, 2), unit, outlier});
}

}  // namespace

Table probe(const Comm& world, const ParallelConfig& config, Device device, DType dtype) {
    const int64_t side = device == Device::cuda ? 4096 : 384, elements = device == Device::cuda ? 1 << 25 : 1 << 19;
    Tensor a({side, side}, dtype, device, Memory::workspace), b = Tensor::like(a, Memory::workspace);
    Tensor c = Tensor::like(a, Memory::workspace), message({elements}, dtype, device, Memory::comm);
    for (Tensor* x : {&a, &b}) fill_normal(*x, 1, {.cols = x->size(), .global_cols = x->size()}, 1);
    fill(message, 1);
    const MeshComms ranks = split(world, config.mesh);
    world.barrier().wait();
    const double product = 2.0 * double(side) * double(side) * double(side) /
                           median_seconds(device, kCalls, [&] { matmul_into(c, a, b, Transpose::b); }) / 1e12;
    Table table(fmt::format("probe of {} ranks", world.size()),
                {"", "least", "median", "most", Column("").left(), Column("").left()});
    add_row(table, fmt::format("product, {} x {}", side, side), "TFLOP/s", world.gather({product}));
    for (const auto& [name, comm] :
         {std::pair("tp", ranks.tp), {"cp", ranks.cp}, {"dp", ranks.dp_cp}, {"pp", ranks.pp}}) {
        if (comm.size() == 1) continue;
        world.barrier().wait();
        // Along pp, a message to the next stage; else an all-reduce.
        const bool to_next = name == std::string("pp");
        Tensor in = to_next ? Tensor::like(message, Memory::comm) : Tensor();
        const double seconds = median_seconds(device, kCalls, [&, group = comm] {
            to_next ? group.ring_shift(message, in).wait() : group.all_reduce(message).wait();
        });
        fill(message, 1);
        const double factor = to_next ? 1 : 2.0 * (comm.size() - 1) / comm.size();  // bytes that a rank sends
        add_row(table, fmt::format("{}, {} over {}", name, to_next ? "shift" : "all-reduce", comm.size()), "GB/s",
                world.gather({factor * double(message.bytes()) / seconds / 1e9}));
    }
    world.take_stats();
    return table;
}

void add_probe_flag(Flags& flags, bool& probes) {
    flags.group("Output");
    flags.add_switch("--probe", probes, "measure all ranks and links before training");
}

void check_probe(bool probes, const CommOptions& comm) {
    if (probes && comm.backend == "fake")
        usage_error("--probe on: not supported with --comm fake, which has no links (try --probe off)");
}

}  // namespace train70b
