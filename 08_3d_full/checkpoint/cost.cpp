#include "08_3d_full/checkpoint/cost.h"

#include <algorithm>
#include <cmath>

#include "07_fp8/complete/optimizers.h"

namespace train70b {

CheckpointCost checkpoint_cost(const TrainOptions& options, const ParallelConfig& config) {
    CheckpointCost cost;
    const DType dtype = options.llama().dtype;
    cost.bytes_per_parameter = checkpoint_bytes(config.optimizer, dtype, muon_share(options.model));
    cost.bytes = std::llround(cost.bytes_per_parameter * double(options.model.parameters()));
    const int64_t ranks = config.mesh.size();
    cost.nodes = (ranks + kRanksPerNode - 1) / kRanksPerNode;
    cost.write_s = double(cost.bytes) / double(cost.nodes) / kNodeWriteRate;
    cost.copy_s = double(cost.bytes) / double(ranks) / kCopyRate;
    return cost;
}

static std::string duration(double seconds) {
    if (seconds < 120) return fmt::format("{:.{}f} s", seconds, seconds < 10 ? 1 : 0);
    return seconds < 7200 ? fmt::format("{:.0f} min", seconds / 60) : fmt::format("{:.1f} h", seconds / 3600);
}

Table checkpoint_table(const CheckpointCost& cost) {
    Table table(fmt::format("checkpoints: {:.1f} GB ({:.2f} bytes per parameter), {} to write at {:.0f} GB/s per node "
                            "on {} node{} of {} ranks",
                            double(cost.bytes) / 1e9, cost.bytes_per_parameter, duration(cost.write_s),
                            kNodeWriteRate / 1e9, cost.nodes, cost.nodes == 1 ? "" : "s", kRanksPerNode),
                {"mean time between failures", "written in the step: every", "lost", "asynchronous: every", "lost"});
    for (const auto& [name, hours] : {std::pair("1 hour", 1.0), {"6 hours", 6.0}, {"1 day", 24.0}, {"1 week", 168.0}}) {
        const double mean = 3600 * hours;
        const auto best_interval = [mean](double cost_s) { return std::sqrt(2 * cost_s * mean); };
        // delay: between the step of a checkpoint and its last byte on the disk, while training goes on
        const auto lost = [&](double step_cost, double interval, double delay) {
            return fmt::format("{:.2f}%", 100 * (step_cost / interval + (interval / 2 + delay) / mean));
        };
        const double sync = best_interval(cost.write_s);
        // One cannot begin before the last one is written.
        const double async = std::max(best_interval(cost.copy_s), cost.write_s);
        table.row({name, duration(sync), lost(cost.write_s, sync, 0), duration(async),
                   lost(cost.copy_s, async, cost.write_s)});
    }
    table.note(
        fmt::format("every sqrt(2 x cost x mean time between failures) (Young 1974, Daly 2006); the cost is the "
                    "writing, or only the copy to the host ({}, at {:.0f} GB/s per GPU)",
                    duration(cost.copy_s), kCopyRate / 1e9));
    return table;
}

}  // namespace train70b
