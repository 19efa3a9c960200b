#pragma once
// bfloat16 on the host: the upper 16 bits of an fp32, rounded to nearest even.
#include <bit>
#include <cstdint>

namespace train70b {

struct bf16 {
    uint16_t bits = 0;

    bf16() = default;
    explicit bf16(float value) {
        const uint32_t u = std::bit_cast<uint32_t>(value);
        const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
        const bool nan = (u & 0x7fffffff) > 0x7f800000;  // rounding could carry a NaN into infinity
        bits = static_cast<uint16_t>(nan ? (u >> 16) | 0x40 : rounded);
    }
    operator float() const { return std::bit_cast<float>(uint32_t(bits) << 16); }
};
static_assert(sizeof(bf16) == 2);

}  // namespace train70b
