#pragma once
// From all layouts to the best ones: what cannot fit is left out by the memory formula, the rest is ranked by the
// estimate. And why each group of the others lost.
#include <functional>
#include <limits>

#include "08_3d_full/plan/estimate.h"

namespace train70b {

struct Candidate {
    Layout layout;
    Estimate estimate;
    MemoryPeak memory;  // of the largest rank: by formula, after a simulation as recorded
    int64_t rank = 0;   // which one that is

    double bytes() const { return double(memory.total); }
};

// The layouts with one tp, cp, pp and ep.
struct LayoutGroup {
    int64_t tp = 1, cp = 1, pp = 1, ep = 1;
    int64_t layouts = 0, fit = 0;       // fit: by formula, as `best` does
    std::optional<Candidate> best;      // the fastest that fits
    std::optional<Candidate> smallest;  // the one with the least memory, where none fits
};

struct Choice {
    double limit = 0;                   // bytes of a device that a layout may take
    int64_t layouts = 0, fit = 0;       // of all
    std::vector<Candidate> best;        // by estimate, fastest first: all that may fit (kFormulaError)
    std::optional<Candidate> smallest;  // of the groups where none fits
    std::vector<LayoutGroup> groups;    // by tp, then cp, then pp, then ep
    std::vector<LeftOut> others;
};
// most: of `best`, of those that fit by formula. The simulation is to see different ones: at most so many with one
// mesh, and that differ in nothing but the number of model chunks.
constexpr int64_t kMostOfMesh = 6, kMostOfVariant = 2;
using OnProgress = std::function<void(const char* what, double part)>;  // now and then: what is done, 0 to 1 of it
Choice choose(
    const PlanRequest& request, const ClusterModel& cluster, double limit, int64_t max_candidates,
    const OnProgress& progress = [](const char*, double) {});

// The rank with the largest peak by formula, and the peak, among the first ranks of the outer stages; or the first of
// these whose peak is above `enough`.
std::pair<int64_t, MemoryPeak> largest_rank(const PlanRequest& request, const Layout& layout,
                                            double enough = std::numeric_limits<double>::infinity());
// Whether any layout fits by formula.
bool any_fits(const PlanRequest& request, double limit);
// The fewest devices on which a layout fits, in whole nodes if there are several. 0: none was found among
// the 256 smallest numbers that could hold the states.
int64_t fewest_gpus(const PlanRequest& request, double limit);

// Why a layout is slower than the best: the part of the step that is larger by the most. "bubble +12.3%"
std::string why_slower(const Estimate& estimate, const Estimate& best);

}  // namespace train70b
