#pragma once
// What a schedule costs in time, without running it: each step begins when its rank is free and its input has arrived.
//     begin(step) = max( end of the rank's step before it,  end of the step it depends on + hop )
#include <functional>

#include "05_pipeline/schedule.h"

namespace train70b {

struct Costs {
    std::function<double(int64_t rank, const Step& step)> step;  // seconds, or any unit
    double hop = 0;  // from the end of a step until its message has arrived; messages do not slow each other down
};
// The same on every rank: a chunk's F is 1/v of a stage's, B = I + W.
Costs equal_costs(const Schedule& schedule, double forward = 1, double input = 1, double weight = 1, double hop = 0);

struct Timeline {
    struct Span {
        Step step;
        double begin, end;
    };
    std::vector<std::vector<Span>> ranks;

    double begin() const;  // of the first step of all
    double total() const;  // from there to the end of the last
    double busy(int64_t rank) const;
    double idle(int64_t rank) const { return 1 - busy(rank) / total(); }  // share of the total
    double bubble() const;  // the mean over ranks of idle(): share of the step, not of the ideal time
};
Timeline simulate(const Schedule& schedule, const Costs& costs);  // CHECKs that the schedule ends

// One line per rank, `width` characters for the whole: F as 0123, backward as bars, idle as dots.
std::string ascii_gantt(const Timeline& timeline, int64_t width);
// Chrome trace events (ui.perfetto.dev): one process per timeline, one thread per rank; the unit is taken as a second.
std::string chrome_trace(const std::vector<std::pair<std::string, Timeline>>& timelines);
// For draw.py: {"title": [[{"step": "F0", "begin": 0, "end": 1}, ...], ...]}
std::string timelines_json(const std::vector<std::pair<std::string, Timeline>>& timelines);

}  // namespace train70b
