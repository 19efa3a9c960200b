#pragma once
// RoPE's rotation at one position, on the CPU: for rope.cpp and latent_heads.cpp, which pair other numbers.
#include <cmath>

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/ops/rope.h"

namespace train70b::cpu {

// cos and sin of position * inv_freq, one for each pair; in double, because positions may be a million.
template <class C>
struct Rotation {
    C cos[kMaxHeadDim / 2], sin[kMaxHeadDim / 2];
    Rotation(const Rope& rope, int32_t position) {
        for (int i = 0; i < rope.head_dim / 2; ++i) {
            const double angle = position * rope.inv_freq[i];
            cos[i] = C(std::cos(angle));
            sin[i] = C(std::sin(angle));
        }
    }
};

}  // namespace train70b::cpu
