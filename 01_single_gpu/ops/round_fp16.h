#pragma once
// Rounding of fp32 tensors to the values of fp16: sign, five bits of exponent, ten of mantissa.
#include <bit>

#include "01_single_gpu/core/tensor.h"

namespace train70b {

// To nearest, ties to even; what rounds to more than 65504 becomes infinite. Without branches, so that loops of it
// vectorize.
inline float to_fp16(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff;
    const bool is_small = magnitude < 0x38800000;                                    // 2^-14: the subnormals
    const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1)) & ~0x1fffu;  // ten bits of mantissa stay
    const float sum = std::bit_cast<float>(is_small ? magnitude : 0) + 0.5f;         // whose last bit is 2^-24
    uint32_t rounded = is_small ? std::bit_cast<uint32_t>(sum - 0.5f) : normal;
    rounded = rounded > 0x477fe000 ? 0x7f800000 : rounded;   // 65504
    rounded = magnitude > 0x7f800000 ? magnitude : rounded;  // not a number
    return std::bit_cast<float>(rounded | (bits & 0x80000000));
}

void round_fp16(Tensor& x);  // each element of x (fp32), on the CPU

}  // namespace train70b
