#pragma once
// Schedules for tests: all of them, and those that are written by hand.
#include "05_pipeline/complete/schedule_file.h"
#include "05_pipeline/complete/schedule_report.h"
#include "05_pipeline/complete/schedule_simulation.h"
#include "tests/support.h"

namespace train70b::test {

// Every schedule of up to 8 stages and up to 17 micro-batches, as far as there is one.
inline void for_each_schedule(const std::function<void(const Schedule&)>& body) {
    for (const ScheduleGenerator& generator : schedule_generators())
        for (int64_t p = 1; p <= 8; ++p)
            for (int64_t m = 1; m <= 17; ++m)
                for (int64_t v = 1; v <= 3; ++v) {
                    const bool loop = generator.chunks == ScheduleGenerator::Chunks::loop;
                    if (loop ? p == 1 : v != generator.default_chunks()) continue;
                    if (!generator.problem(p, m).empty()) continue;
                    const Schedule schedule = make_schedule(generator.name, p, m, v);
                    INFO(generator.name, ", ", p, " stages, ", m, " micro-batches, ", v, " chunks");
                    body(schedule);
                }
}

inline Schedule two_ranks(const std::string& first, const std::string& second, int64_t m) {  // "F0 B0 F1"
    Schedule schedule{"by hand", 2, m, 1, {}, loop_placement(2, 1)};
    for (const std::string& text : {first, second}) {
        auto& steps = schedule.ranks.emplace_back();
        for (size_t i = 0; i < text.size(); i += 3)
            steps.push_back({Pass(std::string("FBIW").find(text[i])), text[i + 1] - '0', 0});
    }
    return schedule;
}

}  // namespace train70b::test
