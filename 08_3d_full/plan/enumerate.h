#pragma once
// All layouts of a model on a number of devices, and why the others are none: sizes that are not divisible.
//
//     gpus = tp x cp x dp x pp, where
//         tp   divides heads, key/value heads (or is divided by them) and ffn
//         cp   divides the sequence (zigzag: 2 cp), or the heads as well (ulysses)
//         pp   divides the layers, or leaves stages that differ by one layer (--stage-layers)
//         dp   divides the global batch
//     and each of those meshes with every ZeRO stage (if there is something to shard), every schedule with its numbers
//     of model chunks, micro-batches of 1, 2, 4 and 8 sequences, and each level of recomputation; with tp > 1 without
//     and with sequence parallelism, and this with overlapped communication, too; ZeRO-3 also as hybrid shard, with
//     groups of 1, 2, 4, ... nodes.
//     With experts each of them for every ep that divides the experts and tp x cp x dp; tp > 1 then always with
//     sequence parallelism, and groups of ZeRO-3 only where tp = ep = 1.
//
// Left out unless a flag asks for it: a schedule that has a reason for it (ScheduleGenerator::on_request); and cp with
// calls of attention with fewer than 1,024 rows, which no kernel is fast for, and whose exchange of keys and values
// nothing hides over a network (chapter 06).
#include <algorithm>
#include <set>

#include "08_3d_full/complete/layout/config.h"

namespace train70b {

// One layout; small, because there are up to a million.
struct Layout {
    int64_t tp = 1, cp = 1, dp = 1, pp = 1;
    int64_t zero = 0, schedule = 0, virtual_stages = 1;  // schedule: index into schedule_generators()
    int64_t micro_batch = 1;
    Recompute recompute = Recompute::none;
    bool sequence_parallel = false, tp_overlap = false;
    int64_t hybrid_shard = 0;  // ranks of a shard group; 0: all
    int64_t ep = 1;            // of the tp x cp x dp ranks of a stage
    auto operator<=>(const Layout&) const = default;

    const ScheduleGenerator& generator() const { return schedule_generators()[size_t(schedule)]; }
    int64_t shards() const { return zero == 0 ? 1 : hybrid_shard > 0 ? hybrid_shard : dp * cp; }
    int64_t edp() const { return tp * cp * dp / ep; }
    bool own_edp() const { return ep > 1 || tp > 1; }  // edp has other ranks than dp x cp
    int64_t ep_shards() const { return own_edp() && zero > 0 ? edp() : shards(); }
    int64_t axes() const {  // that divide
        return (tp > 1) + (cp > 1) + (dp > 1) + (pp > 1) + (hybrid_shard > 0) + (ep > 1);
    }
};

struct PlanRequest {
    LlamaConfig model;
    int64_t gpus = 1, gpus_per_node = 8, seq_len = 4096, global_batch = 1;
    DType dtype = DType::bf16, grad_dtype = DType::f32;
    Fp8Options fp8{.recipe = "off"};
    std::string optimizer = "adamw", cp_algorithm = "zigzag";
    // Values to choose from; empty: all that are above.
    std::vector<int64_t> tp, cp, dp, pp, ep, zero, hybrid_shard, virtual_stages, micro_batch;
    std::vector<std::string> pipeline, recompute, sequence_parallel, tp_overlap;
};

template <class T>
bool allowed(const std::vector<T>& values, const T& value) {
    return values.empty() || std::find(values.begin(), values.end(), value) != values.end();
}

struct LeftOut {
    std::string what, why;       // "tp", "--heads 64 is not divisible by it"; sizes none: a schedule
    std::vector<int64_t> sizes;  // 128, 256
};
struct Enumeration {
    std::vector<Layout> layouts;
    std::vector<LeftOut> others;
};
Enumeration enumerate_layouts(const PlanRequest& request);

// What a layout is to the rest of chapter 08. `stage_layers` is set where the stages differ.
ParallelConfig config_of(const PlanRequest& request, const Layout& layout);
Workload workload_of(const PlanRequest& request, const Layout& layout);
// "--tp 8 --pp 4 ...": what differs from the defaults, and --micro-batch and --recompute.
std::string flags_of(const PlanRequest& request, const Layout& layout);
std::string short_text(const Layout& layout);  // "tp 8 · pp 4 · dp 2, ZeRO-1, interleaved x 5, ..."

// The layers of each of `count` stages; where they do not divide, the first and the last, which have embedding and
// head, have fewer. Empty: there are fewer layers than stages.
std::vector<int64_t> divide_layers(int64_t layers, int64_t count);

// The stages of which one is the slowest and one has the largest rank: the first, the second and the last.
std::set<int64_t> outer_stages(const Layout& layout);

std::string name_of(Recompute level);

}  // namespace train70b
