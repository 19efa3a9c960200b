#include "08_3d_full/plan/choose.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "07_fp8/complete/optimizers.h"

namespace train70b {

namespace {

// The most of a rank: its states, and, if asked for, the inputs of its blocks where these take more than gradients.
double bound(const PlanRequest& request, const Layout& l, bool inputs) {
    const double a = double(size_of(request.dtype)), g = double(size_of(request.grad_dtype));
    const double states = state_bytes(request.optimizer, request.dtype), shards = double(l.shards());
    const double expert_shards = double(l.expert_shards());
    const double rows =
        double(l.micro_batch) * double(request.seq_len / l.cp) / (l.sequence_parallel ? double(l.tp) : 1);
    const double input = inputs ? a * rows * double(request.model.hidden) : 0;
    double most = 0;
    for (const StageSize& stage : stage_sizes(request.model, l)) {
        double kept = 0, grads = 0;
        for (const auto& [n, over] : {std::pair(stage.elements, shards), {stage.expert_elements, expert_shards}}) {
            kept += n * (a / (l.zero == 3 ? over : 1) + states / over);
            grads += n * g / (l.zero >= 2 ? over : 1);
        }
        most = std::max(most, kept + std::max(grads, double(stage.layers) * input));
    }
    return most;
}

}  // namespace

double states_bytes(const PlanRequest& request, const Layout& l) { return bound(request, l, false); }
double least_bytes(const PlanRequest& request, const Layout& l) { return bound(request, l, true); }

std::pair<int64_t, MemoryPeak> largest_rank(const PlanRequest& request, const Layout& l, double enough) {
    const ParallelConfig config = config_of(request, l);
    const Workload workload = workload_of(request, l);
    std::pair<int64_t, MemoryPeak> largest{-1, {}};
    int64_t last = -1;
    for (const int64_t stage : {int64_t(0), std::min<int64_t>(1, l.pp - 1), l.pp - 1}) {
        if (stage <= last) continue;
        last = stage;
        const int64_t rank = config.mesh.rank({.tp = 0, .cp = 0, .dp = 0, .pp = stage});
        const MemoryPeak peak = memory_formula(workload, config, rank);
        if (largest.first < 0 || peak.total > largest.second.total) largest = {rank, peak};
        if (double(peak.total) > enough) break;
    }
    return largest;
}

namespace {
struct Ranked {
    double seconds;
    Layout layout;
    Estimate estimate;
    bool operator<(const Ranked& other) const {  // ties: the same order everywhere
        return std::tuple(seconds, layout) < std::tuple(other.seconds, other.layout);
    }
};
}  // namespace

Choice choose(const PlanRequest& request, const ClusterModel& cluster, double limit, int64_t most,
              const Listener& listener) {
    Enumeration all = enumerate_layouts(request);
    Choice choice{.limit = limit, .layouts = int64_t(all.layouts.size()), .others = std::move(all.others)};
    Estimator estimator(request, cluster);
    std::vector<Ranked> ranked;
    using Key = std::array<int64_t, 4>;
    std::map<Key, LayoutGroup> groups;
    std::map<Key, std::pair<double, Layout>> least;  // by least_bytes(), where that does not fit
    size_t done = 0;
    for (const Layout& layout : all.layouts) {
        listener.progress("estimating layouts", double(done++) / double(all.layouts.size()));
        const Key key = {layout.tp, layout.cp, layout.pp, layout.ep};
        LayoutGroup& group = groups[key];
        group.tp = layout.tp, group.cp = layout.cp, group.pp = layout.pp, group.ep = layout.ep;
        ++group.layouts;
        if (const double bytes = least_bytes(request, layout); bytes > limit) {
            auto [at, is_new] = least.try_emplace(key, bytes, layout);
            const auto order = [](double least, const Layout& l) {
                return std::tuple(least, l.micro_batch, -int(l.recompute), !l.sequence_parallel);
            };
            if (!is_new && order(bytes, layout) < order(at->second.first, at->second.second))
                at->second = {bytes, layout};
            continue;
        }
        const Estimate estimate = estimator(layout);
        ranked.push_back({estimate.seconds(), layout, estimate});
    }
    std::sort(ranked.begin(), ranked.end());

    std::map<Layout, int64_t> of_mesh, of_variant;
    done = 0;
    for (const Ranked& each : ranked) {
        listener.progress("fitting layouts into memory", double(done++) / double(ranked.size()));
        LayoutGroup& group = groups[{each.layout.tp, each.layout.cp, each.layout.pp, each.layout.ep}];
        const bool wants_smallest = !group.best;  // where none fits
        const double smallest = group.smallest ? double(group.smallest->memory.total) : kInfinity;
        const auto [rank, memory] =
            largest_rank(request, each.layout, wants_smallest ? std::max(limit, smallest) : limit);
        const Candidate candidate{each.layout, each.estimate, memory, rank};
        if (double(memory.total) <= limit) {
            ++group.fit, ++choice.fit;
            if (!group.best) group.best = candidate;
            if (int64_t(choice.best.size()) < most) {
                const Layout& l = each.layout;
                Layout variant = l;
                variant.virtual_stages = 1;
                int64_t& meshes = of_mesh[{.tp = l.tp, .cp = l.cp, .dp = l.dp, .pp = l.pp, .ep = l.ep}];
                if (meshes < kMostOfMesh && ++of_variant[variant] <= kMostOfVariant) {
                    ++meshes;
                    choice.best.push_back(candidate);
                    if (int64_t(choice.best.size()) == most) listener.first_list(choice);
                }
            }
        } else if (!group.best && (!group.smallest || memory.total < group.smallest->memory.total)) {
            group.smallest = candidate;
        }
    }
    if (!choice.best.empty() && int64_t(choice.best.size()) < most) listener.first_list(choice);
    for (auto& [key, group] : groups) {
        if (group.best) group.smallest.reset();
        if (!group.best && !group.smallest) {
            const Layout& layout = least.at(key).second;
            const auto [rank, memory] = largest_rank(request, layout);
            group.smallest = Candidate{layout, estimator(layout), memory, rank};
        }
        if (group.smallest && (!choice.smallest || group.smallest->memory.total < choice.smallest->memory.total))
            choice.smallest = group.smallest;
        choice.groups.push_back(std::move(group));
    }
    if (!choice.best.empty()) choice.smallest.reset();
    return choice;
}

bool any_fits(const PlanRequest& request, double limit) {
    const Enumeration all = enumerate_layouts(request);
    return std::any_of(all.layouts.begin(), all.layouts.end(), [&](const Layout& layout) {
        return least_bytes(request, layout) <= limit &&
               double(largest_rank(request, layout, limit).second.total) <= limit;
    });
}

int64_t fewest_gpus(const PlanRequest& request, double limit) {
    PlanRequest r = request;
    r.dp.clear();  // the axis that grows with the number of devices
    const int64_t gpus_per_node = r.gpus_per_node;
    // least_bytes() of a device, if everything is divided evenly.
    const double a = double(size_of(r.dtype)), parameters = double(r.model.parameters());
    const double inputs = a * double(r.model.layers) * double(r.seq_len) * double(r.model.hidden);
    const double bound = ((a + state_bytes(r.optimizer, r.dtype)) * parameters +
                          std::max(double(size_of(r.grad_dtype)) * parameters, inputs)) /
                         limit;
    constexpr int64_t kMost = 1 << 20, kMostTries = 256;
    if (!(bound <= double(kMost))) return 0;
    int64_t n = std::max<int64_t>(1, int64_t(std::ceil(bound)));
    for (int tries = 0; n <= kMost && tries < kMostTries; ++tries) {
        if (n > gpus_per_node) n = (n + gpus_per_node - 1) / gpus_per_node * gpus_per_node;
        r.gpus = n;
        if (any_fits(r, limit)) return n;
        n += n < gpus_per_node ? 1 : gpus_per_node;
    }
    return 0;
}

std::string why_slower(const Estimate& estimate, const Estimate& best) {
    const auto mine = parts_of(estimate), others = parts_of(best);
    std::vector<std::pair<double, const char*>> more;
    for (size_t i = 0; i < mine.size(); ++i)
        if (estimate.ep > 0 || best.ep > 0 || std::string_view(mine[i].first) != "exposed ep")
            more.emplace_back((mine[i].second - others[i].second) / best.seconds(), mine[i].first);
    std::sort(more.rbegin(), more.rend());
    std::string text;
    for (size_t i = 0; i < 2 && (i == 0 || more[i].first >= 0.02); ++i)
        text += fmt::format("{}{} {:+.1f}%", i > 0 ? ", " : "", more[i].second, 100 * more[i].first);
    return text;
}

}  // namespace train70b
