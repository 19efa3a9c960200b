#include "08_3d_full/plan/choose.h"

#include <algorithm>
#include <cmath>

#include "07_fp8/complete/optimizers.h"

namespace train70b {

std::pair<int64_t, MemoryPeak> largest_rank(const PlanRequest& request, const Layout& l, double enough) {
    const ParallelConfig config = config_of(request, l);
    const Workload workload = workload_of(request, l);
    std::pair<int64_t, MemoryPeak> largest{-1, {}};
    for (const int64_t stage : outer_stages(l)) {
        const int64_t rank = config.mesh.rank({.tp = 0, .cp = 0, .dp = 0, .pp = stage});
        const MemoryPeak peak = memory_formula(workload, config, rank);
        if (largest.first < 0 || peak.total > largest.second.total) largest = {rank, peak};
        if (double(peak.total) > enough) break;
    }
    return largest;
}

Choice choose(const PlanRequest& request, const ClusterModel& cluster, double limit, int64_t max_candidates,
              const OnProgress& progress) {
    Enumeration all = enumerate_layouts(request);
    Choice choice{.limit = limit, .layouts = int64_t(all.layouts.size()), .others = std::move(all.others)};
    Estimator estimator(request, cluster);
    std::vector<Candidate> candidates;
    std::map<std::array<int64_t, 4>, LayoutGroup> groups;
    const double may_fit = limit / (1 - kFormulaError);
    size_t done = 0;
    for (const Layout& layout : all.layouts) {
        progress("estimating layouts", double(done++) / double(all.layouts.size()));
        LayoutGroup& group = groups[{layout.tp, layout.cp, layout.pp, layout.ep}];
        group.tp = layout.tp, group.cp = layout.cp, group.pp = layout.pp, group.ep = layout.ep;
        ++group.layouts;
        const double smallest = group.smallest ? group.smallest->bytes() : kInfinity;
        const auto [rank, memory] = largest_rank(request, layout, std::max(may_fit, group.fit > 0 ? 0 : smallest));
        const bool fits = double(memory.total) <= limit;
        group.fit += fits, choice.fit += fits;
        if (double(memory.total) <= may_fit) candidates.push_back({layout, estimator(layout), memory, rank});
        if (group.fit == 0 && double(memory.total) < smallest)
            group.smallest = {layout, estimator(layout), memory, rank};
    }
    const auto order = [](const Candidate& c) { return std::tuple(c.estimate.seconds(), c.layout); };  // ties, too
    std::ranges::sort(candidates, {}, order);
    // Those that fit by formula and those that only may fit are counted apart: neither takes the other's places.
    std::map<std::pair<bool, Layout>, int64_t> of_mesh, of_variant;
    int64_t chosen = 0;
    for (const Candidate& candidate : candidates) {
        const Layout& l = candidate.layout;
        const bool fits = candidate.bytes() <= limit;
        LayoutGroup& group = groups[{l.tp, l.cp, l.pp, l.ep}];
        if (fits && !group.best) group.best = candidate;
        if (chosen == max_candidates) continue;
        Layout variant = l;
        variant.virtual_stages = 1;
        int64_t& meshes = of_mesh[{fits, {.tp = l.tp, .cp = l.cp, .dp = l.dp, .pp = l.pp, .ep = l.ep}}];
        if (meshes == kMostOfMesh || ++of_variant[{fits, variant}] > kMostOfVariant) continue;
        ++meshes;
        chosen += fits;
        choice.best.push_back(candidate);
    }
    for (auto& [key, group] : groups) {
        if (group.best) group.smallest.reset();
        if (group.smallest && (!choice.smallest || group.smallest->memory.total < choice.smallest->memory.total))
            choice.smallest = group.smallest;
        choice.groups.push_back(std::move(group));
    }
    return choice;
}

bool any_fits(const PlanRequest& request, double limit) {
    return std::ranges::any_of(enumerate_layouts(request).layouts, [&](const Layout& layout) {
        return double(largest_rank(request, layout, limit).second.total) <= limit;
    });
}

int64_t fewest_gpus(const PlanRequest& request, double limit) {
    PlanRequest r = request;
    r.dp.clear();  // the axis that grows with the number of devices
    const int64_t gpus_per_node = r.gpus_per_node;
    const double states =
        double(size_of(r.dtype) + size_of(r.grad_dtype)) + state_bytes(r.optimizer, r.dtype, muon_share(r.model));
    const double bound = states * double(r.model.parameters()) / limit;  // if everything is divided evenly
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
    const auto parts = parts_of(estimate), best_parts = parts_of(best);
    std::vector<std::pair<double, const char*>> more;
    for (size_t i = 0; i < parts.size(); ++i)
        if (estimate.ep > 0 || best.ep > 0 || std::string_view(parts[i].first) != "exposed ep")
            more.emplace_back((parts[i].second - best_parts[i].second) / best.seconds(), parts[i].first);
    std::sort(more.rbegin(), more.rend());
    std::string text;
    for (size_t i = 0; i < 2 && (i == 0 || more[i].first >= 0.02); ++i)
        text += fmt::format("{}{} {:+.1f}%", i > 0 ? ", " : "", more[i].second, 100 * more[i].first);
    return text;
}

}  // namespace train70b
