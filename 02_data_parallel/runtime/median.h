#pragma once
#include <algorithm>
#include <vector>

namespace train70b {

inline double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values.empty() ? 0 : values[values.size() / 2];
}

}  // namespace train70b
