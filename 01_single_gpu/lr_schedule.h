#pragma once
// Learning-rate schedules: a registry of shapes, and the warm-up in front of them.
//
//   step s of a warm-up of W     peak * s / W
//   after it                     min + (peak - min) * shape(s)
#include <cstdint>
#include <string>
#include <vector>

namespace train70b {

// Add a schedule here: the --lr-schedule flag, its checks and the tests iterate over lr_shapes().
struct LrShape {
    const char* name;
    const char* text;  // one line of help
    // What is left of the way from peak to min at a step after the warm-up: 1 at its end. Steps count from 1.
    double (*left)(int64_t step, int64_t warmup, int64_t steps);
};
const std::vector<LrShape>& lr_shapes();
const LrShape& lr_shape(const std::string& name);  // usage error for an unknown one

struct LrSchedule {
    double peak = 0, min = 0;
    int64_t warmup = 0, steps = 0;
    std::string shape = "cosine";
    double at(int64_t step) const;  // step from 1
};

}  // namespace train70b
