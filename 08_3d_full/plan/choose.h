#pragma once
// From all layouts to the best ones: what does not fit is left out by the memory formula, the rest is ranked by the
// estimate. And why each group of the others lost.
#include "08_3d_full/plan/estimate.h"
#include "08_3d_full/plan/memory_formula.h"

namespace train70b {

struct Candidate {
    Layout layout;
    Estimate estimate;
    MemoryPeak memory;  // of the largest rank, by formula
    int64_t rank = 0;   // which one that is
};

// The layouts with one tp, cp and pp.
struct LayoutGroup {
    int64_t tp = 1, cp = 1, pp = 1;
    int64_t layouts = 0, fit = 0;
    std::optional<Candidate> best;      // the fastest that fits
    std::optional<Candidate> smallest;  // the one with the least memory, where none fits
};

struct Choice {
    double limit = 0;                   // bytes of a device that a layout may take
    int64_t layouts = 0, fit = 0;       // of all
    std::vector<Candidate> best;        // by estimate, fastest first
    std::optional<Candidate> smallest;  // of all, where none fits
    std::vector<LayoutGroup> groups;    // by tp, then cp, then pp
    std::vector<NotDivisible> others;
};
// most: of `best`, and at most kMostOfMesh of them with one mesh: the simulation is to see different ones.
constexpr int64_t kMostOfMesh = 10;
Choice choose(const PlanRequest& request, const ClusterModel& cluster, double limit, int64_t most);

// The rank with the largest peak, and the peak, among the ranks that may be it: the first of the first, the second and
// the last stage.
std::pair<int64_t, MemoryPeak> largest_rank(const PlanRequest& request, const Layout& layout);
// A bound from below: parameters, gradients and optimizer states alone.
double states_bytes(const PlanRequest& request, const Layout& layout);
// Whether any layout fits.
bool any_fits(const PlanRequest& request, double limit);
// The fewest devices on which a layout fits, in whole nodes if there are several. 0: none was found among
// the 256 smallest numbers that could hold the states.
int64_t fewest_gpus(const PlanRequest& request, int64_t gpus_per_node, double limit);

// Why a layout is slower than the best: the part of the step that is larger by the most. "bubble +12.3%"
std::string why_slower(const Estimate& estimate, const Estimate& best);

}  // namespace train70b
