#pragma once
// What rmsnorm.cpp and head_norm.cpp share: 1 / rms of one row.
#include <cmath>

#include "01_single_gpu/core/cpu.h"

namespace train70b::cpu {

template <class T>
Wide<T> inv_rms_of(const T* x, int64_t cols, double eps) {
    using C = Wide<T>;
    C sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < cols; ++c) sum += C(x[c]) * C(x[c]);
    return C(1) / std::sqrt(sum / C(cols) + C(eps));
}

}  // namespace train70b::cpu
