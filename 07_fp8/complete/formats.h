#pragma once
// The 8-bit formats of training, in software (Micikevicius et al. 2022; the OCP specifications of FP8 and of MX).
//
//          sign  exponent  mantissa   bias   largest   smallest normal, subnormal    infinity    not a number
//   E4M3     1       4         3         7       448       2^-6,  2^-9               none        S.1111.111
//   E5M2     1       5         2        15     57344       2^-14, 2^-16              S.11111.00  S.11111.{01, 10, 11}
//   E8M0     0       8         0       127     2^127       2^-127, none              none        11111111
//   E2M1     1       2         1         1         6       1,     0.5                none        none
//
// E4M3, with the longer mantissa, is for weights and activations: its largest relative rounding error is 2^-4. E5M2 has
// the range of fp16, for gradients, and half the precision. E8M0 is for scales: powers of two, no zero. E2M1 is NVFP4's
// data.
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace train70b {

// What a value beyond the format's largest becomes.
enum class Overflow {
    saturate,  // the largest value, also for an infinity
    honest,    // infinity, or NaN where the format has no infinity
    training   // a finite value saturates, an infinity does not: a diverged run must not look healthy
};

template <int kExponentBits, int kMantissaBits, bool kHasInfinity>
struct Float8 {
    static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
    static constexpr uint8_t kInfinity = kHasInfinity ? 0x7c : 0x7f;  // E4M3: not a number
    static constexpr uint8_t kNaN = 0x7f;                             // the quiet one with all bits set
    static constexpr uint8_t kLargestBits = kHasInfinity ? 0x7b : 0x7e;

    uint8_t bits = 0;

    Float8() = default;
    constexpr explicit Float8(float x, Overflow overflow = Overflow::training) : bits(round(x, overflow)) {}
    static constexpr Float8 of_bits(uint8_t bits) {
        Float8 x;
        x.bits = bits;
        return x;
    }
    constexpr operator float() const { return value(bits); }
    static constexpr float largest() { return value(kLargestBits); }

    static constexpr float value(uint8_t bits) {
        const int exponent = (bits & 0x7f) >> kMantissaBits, mantissa = bits & ((1 << kMantissaBits) - 1);
        const float sign = bits & 0x80 ? -1.0f : 1.0f;
        if ((bits & 0x7f) > kLargestBits)
            return kHasInfinity && mantissa == 0 ? sign * std::numeric_limits<float>::infinity()
                                                 : std::numeric_limits<float>::quiet_NaN();
        if (exponent == 0) return sign * float(mantissa) * power_of_two(1 - kBias - kMantissaBits);
        return sign * float(mantissa + (1 << kMantissaBits)) * power_of_two(exponent - kBias - kMantissaBits);
    }

  private:
    // To nearest, ties to even. No branches, so that loops of it vectorize.
    static constexpr uint8_t round(float x, Overflow overflow) {
        constexpr int kShift = 23 - kMantissaBits;  // mantissa bits of an fp32 that are rounded away
        const uint32_t u = std::bit_cast<uint32_t>(x), magnitude = u & 0x7fffffff;
        // Normal: adding half a unit (less one bit, if the last bit kept is even) carries into the bits kept, the
        // exponent included; then the exponent gets its new bias.
        const uint32_t half = (1u << (kShift - 1)) - 1 + ((magnitude >> kShift) & 1);
        const uint32_t normal = ((magnitude + half) >> kShift) - (uint32_t(127 - kBias) << kMantissaBits);
        // Subnormal: adding a float whose last bit has the value of the smallest subnormal rounds to it.
        constexpr float kAnchor = power_of_two(1 - kBias - kMantissaBits + 23);
        const float sum = std::bit_cast<float>(magnitude < kSmallestNormal ? magnitude : 0) + kAnchor;
        const uint32_t subnormal = std::bit_cast<uint32_t>(sum) - std::bit_cast<uint32_t>(kAnchor);

        const uint32_t rounded = magnitude < kSmallestNormal ? subnormal : normal;
        const bool infinite = magnitude == 0x7f800000;
        const bool stays = overflow == Overflow::saturate || (overflow == Overflow::training && !infinite);
        uint32_t code = rounded > kLargestBits ? (stays ? kLargestBits : kInfinity) : rounded;
        code = magnitude > 0x7f800000 ? kNaN : code;
        return uint8_t(code | (magnitude > 0x7f800000 ? 0 : (u >> 24) & 0x80));
    }
    static constexpr float power_of_two(int exponent) { return std::bit_cast<float>(uint32_t(exponent + 127) << 23); }
    static constexpr uint32_t kSmallestNormal = uint32_t(1 - kBias + 127) << 23;  // as the bits of an fp32
};

// The values of all 256 bit patterns; by dtype: values_of().
template <class Format>
inline constexpr std::array<float, 256> kValues = [] {
    std::array<float, 256> values{};
    for (int i = 0; i < 256; ++i) values[std::size_t(i)] = Format::value(std::uint8_t(i));
    return values;
}();

using e4m3 = Float8<4, 3, false>;
using e5m2 = Float8<5, 2, true>;
static_assert(sizeof(e4m3) == 1 && sizeof(e5m2) == 1);
static_assert(e4m3::largest() == 448 && e5m2::largest() == 57344);

// The definition of e4m3(x).bits, step by step: what the conversion above, without branches, is tested against.
uint8_t e4m3_by_definition(float x);  // formats.cpp

// A scale: 2^(bits - 127). Made from |x|; rounded up, so that values divided by it do not overflow, or down.
struct e8m0 {
    uint8_t bits = 127;

    e8m0() = default;
    constexpr explicit e8m0(float x, bool up = true) {
        const uint32_t magnitude = std::bit_cast<uint32_t>(x) & 0x7fffffff, mantissa = magnitude & 0x7fffff;
        const uint32_t exponent = magnitude >> 23;
        const bool more = up && (exponent == 0 ? mantissa > 0x400000 : mantissa > 0);  // 2^-127 is an fp32 subnormal
        const bool nan = magnitude > 0x7f800000;
        bits = uint8_t(nan ? 255 : exponent >= 254 ? 254 : exponent + more);
    }
    constexpr operator float() const { return value(bits); }
    static constexpr float value(uint8_t bits) {
        if (bits == 255) return std::numeric_limits<float>::quiet_NaN();
        return std::bit_cast<float>(bits == 0 ? 0x400000u : uint32_t(bits) << 23);
    }
};

// Four bits: the code's three bits of magnitude count the values 0, 0.5, 1, 1.5, 2, 3, 4, 6. All else saturates.
struct e2m1 {
    uint8_t bits = 0;

    constexpr explicit e2m1(float x) {  // to nearest; ties go to the even code
        const float m = x < 0 ? -x : x;
        bits = uint8_t((m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5) +
                       sign(x));
    }
    constexpr e2m1(float x, float u) {  // up or down: with u uniform in [0, 1) the expected value is x
        const float size = x < 0 ? -x : x, m = size < 6 ? size : 6, step = m < 2 ? 0.5f : m < 4 ? 1.0f : 2.0f;
        const float below = float(int(m / step));
        bits = uint8_t(e2m1((below + float(u < m / step - below)) * step).bits + sign(x));
    }
    constexpr operator float() const { return value(bits); }
    static constexpr float value(uint8_t bits) {
        const int m = bits & 7;
        const float magnitude = m < 2 ? float(m) / 2 : float(2 + m % 2) / 2 * float(1 << (m / 2 - 1));
        return bits & 8 ? -magnitude : magnitude;
    }

  private:
    static constexpr int sign(float x) { return std::bit_cast<uint32_t>(x) >> 31 << 3; }
};

// Symmetric: -127 to 127.
struct int8 {
    int8_t bits = 0;

    int8() = default;
    explicit int8(float x) : bits(int8_t(std::nearbyint(x > 127 ? 127 : x >= -127 ? x : -127))) {}
    static constexpr float value(uint8_t bits) { return float(int8_t(bits)); }
};

}  // namespace train70b
