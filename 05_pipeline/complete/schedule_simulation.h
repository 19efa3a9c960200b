#pragma once
// What a schedule costs in time, without running it: each step begins when its rank is free and its input has arrived.
//     begin(step) = max( end of the rank's step before it,  end of the step it depends on + hop )
#include <functional>

#include "05_pipeline/complete/schedule.h"

namespace train70b {

struct Costs {
    std::function<double(int64_t rank, const Step& step)> step;  // seconds, or any unit
    double hop = 0;  // latency from the end of a step to the arrival of its message; there is no contention
};
// Equal stages: the F of one chunk takes 1/v of `forward`, and so on; B = I + W.
Costs equal_costs(const Schedule& schedule, double forward = 1, double input = 1, double weight = 1, double hop = 0);

struct Timeline {
    struct Span {
        Step step;
        double begin, end;
        bool critical = false;  // on a critical path; simulate() marks one
    };
    std::vector<std::vector<Span>> ranks;

    double begin() const;  // of the first step on any rank
    double total() const;  // from there to the end of the last step on any rank
    double busy(int64_t rank) const;
    double idle(int64_t rank) const { return 1 - busy(rank) / total(); }  // share of total()
    double bubble() const;  // the mean over ranks of idle(): share of the step, not of the ideal time
    // The cost of the zero-bubble paper (Qi et al. 2023, section 5): the longest time that any one rank takes from its
    // own first step to its own last. Where ranks that begin later also end later, training steps can follow one
    // another without idle time, and this, not total(), is the time per training step.
    double longest_span() const;
    double span(int64_t rank) const;  // of this rank
    double span_bubble() const;       // the idle share of the longest span: of the rank that has it
};
Timeline simulate(const Schedule& schedule, const Costs& costs);  // CHECK fails if the schedule deadlocks

// Training steps one after another, where no rank waits for another between them: the optimizer step takes no time and
// has no norm that all ranks sum. Micro-batch i of step k is k*m + i.
Schedule consecutive(const Schedule& schedule, int64_t steps);

// One line per rank, `width` characters for the whole step; dots where the rank is idle; = on the critical path; small
// letters for chunk 1 (and 3, 5, ...). A pass has the numbers of its micro-batches if all of them fit.
std::string ascii_gantt(const Timeline& timeline, int64_t width);
// Chrome trace events (ui.perfetto.dev): one process per timeline, one thread per rank; the unit is taken as a second.
std::string chrome_trace(const std::vector<std::pair<std::string, Timeline>>& timelines);

}  // namespace train70b
