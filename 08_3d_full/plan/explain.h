#pragma once
// The planner's answer as tables and as sentences.
#include "01_single_gpu/complete/report/table.h"
#include "08_3d_full/plan/choose.h"

namespace train70b {

// A layout with what is predicted for it.
struct Prediction {
    Candidate candidate;
    double seconds = 0;                                   // of a step
    bool simulated = false;                               // else by the estimate
    double pp_wait = 0;                                   // share of the step that ranks wait along the pipeline
    std::vector<std::pair<std::string, double>> exposed;  // seconds, by group ("tp")
    int64_t equal_to = 0;                                 // place in the list, from 1, of the first that is as fast

    double tokens_per_s_per_gpu(const PlanRequest& request) const;
    double mfu(const PlanRequest& request, const DeviceModel& device) const;  // of the bf16 peak
};
Prediction estimated(const Candidate& candidate);

// Best first. Layouts that are slower than the fastest by no more than kEqual are equal to it: first those that leave a
// tenth of the device free besides the reserve, then by the fewest axes, then by speed. (More free memory than that is
// of no use: an axis that only makes room is a cost.) Then come the next fastest and its equals.
// kEqual: where published runs differ in the layout alone, half of the simulated ratios of two speeds are off by more
// (docs/published.md).
constexpr double kEqual = 0.04;
std::vector<Prediction> ordered(std::vector<Prediction> all, double device_bytes, double limit);

Table best_table(const PlanRequest& request, const DeviceModel& device, const std::vector<Prediction>& best,
                 const Choice& choice, const std::string& caption);
Table groups_table(const Choice& choice, const Candidate& winner, const DeviceModel& device, size_t most_rows);
Table memory_table(const std::vector<Prediction>& best, const Choice& choice);

// How one gets to a layout by hand, with the numbers of this case: one line per step.
std::vector<std::string> decision_steps(const PlanRequest& request, const ClusterModel& cluster, const Choice& choice,
                                        const Prediction& winner);

constexpr double kSecondsPerDay = 86400;
constexpr double kTokensPerParameter = 20;  // Hoffmann et al. 2022 (Chinchilla), approaches 1 and 2
struct BudgetOptions {
    double price = 2, tokens = 15e12;  // dollars per GPU-hour; tokens to train on
};
struct RunCost {
    double days = 0, gpu_hours = 0, price = 0;
};
// tokens_per_s: of all `gpus` together. No failures: checkpoint/cost.h has what they cost.
RunCost run_cost(double tokens, double tokens_per_s, double gpus, double price_per_gpu_hour);
double checkpoint_bytes(const PlanRequest& request);
Table budget_table(const PlanRequest& request, const Prediction& winner, const BudgetOptions& options);

std::string text_of(const LeftOut& other);  // "tp 128, 256: --heads 64 is not divisible by it"
std::string gigabytes(double bytes);        // "12.3"

}  // namespace train70b
