#pragma once
// What a simulated step says to a reader: where its time goes, as tables, and as a timeline.
#include "01_single_gpu/report/table.h"
#include "08_3d_full/plan/simulate.h"

namespace train70b {

// What a step computes, over all ranks.
struct StepWork {
    double tokens = 0, flops = 0;  // flops: of the model (flops_per_token), no recomputation
    DType dtype = DType::bf16;     // whose peak MFU refers to; FP8 runs: bf16
};

double tokens_per_s_per_gpu(const SimulatedStep& step, const StepWork& work, int64_t ranks);
double mfu(const SimulatedStep& step, const StepWork& work, const ClusterModel& cluster, int64_t ranks);

// Computation, exposed communication and waiting by axis; below it tokens per second, MFU, the peak of memory.
Table step_table(const SimulatedStep& step, const Recording& recording, const ClusterModel& cluster,
                 const StepWork& work);
// The ops, the longest first.
Table ops_table(const SimulatedStep& step);

// Chrome trace events (ui.perfetto.dev): a process per traced rank, a thread per stream, a counter of its memory.
std::string chrome_trace(const SimulatedStep& step);

}  // namespace train70b
