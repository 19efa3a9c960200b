#pragma once
// Learning-rate schedules: a linear warmup, followed by one of a registry of shapes.
//
//   step s of W warmup steps     peak * s / W
//   after the warmup             min + (peak - min) * shape(s)
#include <string>
#include <vector>

namespace train70b {

// Add a schedule here: the --lr-schedule flag, its checks and the tests iterate over lr_shapes().
struct LrShape {
    const char* name;
    const char* description;  // one line of help
    // shape(step) after the warmup: 1 at the peak, 0 at the minimum. Steps count from 1; StepSizes::position() has
    // fractions.
    double (*factor)(double step, double warmup, double steps);
};
const std::vector<LrShape>& lr_shapes();
const LrShape& lr_shape(const std::string& name);  // usage error for an unknown name

struct LrSchedule {
    double peak = 0, min = 0;
    double warmup = 0, steps = 0;
    std::string shape = "cosine";
    double at(double step) const;  // step from 1
};

}  // namespace train70b
