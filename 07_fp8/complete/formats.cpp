// E4M3 by its definition: the readable form of what formats.h computes in a few integer operations.
#include "07_fp8/complete/formats.h"

#include <algorithm>
#include <cmath>

#include "01_single_gpu/core/check.h"

namespace train70b {

uint8_t e4m3_by_definition(float x) {
    constexpr int kBias = 7, kMantissaBits = 3, kSmallestExponent = 1 - kBias;  // of normal numbers
    constexpr uint8_t kNaN = 0x7f, kLargest = 0x7e;                             // 0.1111.111, and 0.1111.110 = 448
    // tag::lab-e4m3-rounding[]
    if (std::isnan(x)) return kNaN;
    const uint8_t sign = std::signbit(x) ? 0x80 : 0;
    if (std::isinf(x)) return sign | kNaN;  // E4M3 has no infinity, and a diverged run must stay visible
    // |x| = fraction 2^exponent, 1 <= fraction < 2. Below the smallest normal number the exponent stays: there the
    // values are multiples of 2^-9. (The ilogb of 0 is a large negative number.)
    const int exponent = std::max(std::ilogb(x), kSmallestExponent);
    // In units of the last mantissa bit; nearbyint rounds ties to even.
    const int units = int(std::nearbyint(std::ldexp(std::fabs(x), kMantissaBits - exponent)));
    // 8 to 15 units are a normal number, with the leading one that is not stored: they add 1 to the exponent's code. 16
    // carry into it and add 2, and fewer than 8, a subnormal number, add nothing.
    const int code = (exponent - kSmallestExponent) * (1 << kMantissaBits) + units;
    return sign | uint8_t(std::min<int>(code, kLargest));
    // end::lab-e4m3-rounding[]
}

}  // namespace train70b
