#pragma once
// The options of FP8; flags.h has their flags.
#include <cstdint>
#include <string>

namespace train70b {

struct Fp8Options {
    std::string recipe = "current";  // off, or one of fp8_recipes()
    bool strict = false;             // a layer that cannot be in 8 bits is a usage error
    int64_t history = 1024;          // delayed: length of the amax history, in steps
    int64_t margin = 0;              // delayed: the scale leaves room for amaxes 2^margin times as large
};

}  // namespace train70b
