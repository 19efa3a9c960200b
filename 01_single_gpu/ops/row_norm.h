#pragma once
// What rmsnorm.cpp and head_norm.cpp share: 1 / rms of one row.
#include <cmath>

#include "01_single_gpu/core/cpu.h"

namespace train70b::cpu {

template <class T>
Wide<T> inv_rms_of(const T* x, int64_t cols, double eps) {
    using C = Wide<T>;
    const C sum = reduced<C>(0, cols, [x](int64_t c) { return C(x[c]) * C(x[c]); });
    return C(1) / std::sqrt(sum / C(cols) + C(eps));
}

}  // namespace train70b::cpu
