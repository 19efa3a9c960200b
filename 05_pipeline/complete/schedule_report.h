#pragma once
// What `schedule` prints of a schedule: its ranks, its training steps one after another, and the other schedules.
#include "01_single_gpu/complete/report/table.h"
#include "05_pipeline/complete/schedule_simulation.h"

namespace train70b {

// In any unit; of one micro-batch on one rank with equal stages: a chunk takes 1/v of it.
struct SandboxCosts {
    double forward = 1, input = 1, weight = 1, hop = 0;  // F, I, W (B = I + W), and a message
    std::vector<std::pair<int64_t, double>> slow;        // rank, how many times as long its steps take

    Costs of(const Schedule& schedule) const;
    std::string text() const;  // "F 1, I 1, W 1, hop 0.5, rank 2 x 1.5"
};

// One row per rank; in CSV with everything that made it.
Table ranks_table(const Schedule& schedule, const Timeline& timeline, const SandboxCosts& costs);
Table spans_table(const Schedule& schedule, const Timeline& timeline);  // one row per step: for CSV
// N training steps: where all ranks wait for the last between two of them, as for the norm of the gradients, and where
// none waits for another.
Table steps_table(const Schedule& schedule, const SandboxCosts& costs, int64_t steps);
// Schedules side by side: `schedule`, if there is one, and all generated ones that this p and m allow.
Table comparison_table(const Schedule* schedule, int64_t p, int64_t m, const SandboxCosts& costs);

}  // namespace train70b
