// The 8-bit formats: against the definition, code by code, and against CUDA's host conversions where their header is.
#include "07_fp8/complete/formats.h"
#include "tests/support.h"

#if TRAIN70B_CUDA
#include <cuda_fp8.h>
#endif

using namespace train70b;
using namespace train70b::test;

namespace {

float as_float(uint32_t bits) { return std::bit_cast<float>(bits); }

// The value of a code, from the definition, in double.
template <class Format>
double by_definition(int code, int mantissa_bits, int bias, bool ieee) {
    const int exponent_bits = 7 - mantissa_bits, exponent = (code & 0x7f) >> mantissa_bits;
    const int mantissa = code & ((1 << mantissa_bits) - 1), all_ones = (1 << exponent_bits) - 1;
    const double sign = code & 0x80 ? -1 : 1;
    if (ieee && exponent == all_ones) return mantissa == 0 ? sign * INFINITY : NAN;
    if (!ieee && (code & 0x7f) == 0x7f) return NAN;
    const double fraction = double(mantissa) / (1 << mantissa_bits);
    return exponent == 0 ? sign * std::ldexp(fraction, 1 - bias) : sign * std::ldexp(1 + fraction, exponent - bias);
}

// Body with every fp32 that could matter: each pattern of the upper 16 bits, which hold all that decides but whether
// anything follows, with lower halves at and beside every tie.
template <class Body>
void for_deciding_floats(Body&& body) {
    for (uint32_t upper = 0; upper < 0x10000; ++upper)
        for (const uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) body(as_float(upper << 16 | lower));
}

template <class Format>
void check_format(int mantissa_bits, int bias, bool ieee) {
    // Codes ascending, without the sign, up to the largest.
    std::vector<double> ascending;
    for (int code = 0; code < 256; ++code) {
        const double expected = by_definition<Format>(code, mantissa_bits, bias, ieee);
        const float value = Format::of_bits(uint8_t(code));
        INFO("code ", code, ": ", value, ", expected ", expected);
        EXPECT((std::isnan(expected) ? std::isnan(value) : double(value) == expected));
        EXPECT((std::isnan(expected) ? std::isnan(kValues<Format>[size_t(code)])
                                     : double(kValues<Format>[size_t(code)]) == expected));
        if (code < 128 && std::isfinite(expected)) ascending.push_back(expected);
        if (std::isfinite(expected)) EXPECT(Format(value).bits == code);  // every code is its own value's
    }
    REQUIRE(Format::largest() == float(ascending.back()));

    // Rounding to nearest, ties to even: found by looking, with the tie between the largest code and what would follow.
    const double after = 2 * ascending.back() - ascending[ascending.size() - 2];
    int64_t wrong = 0;
    for_deciding_floats([&](float x) {
        const int sign = std::signbit(x) ? 0x80 : 0;
        const double magnitude = std::abs(double(x));
        int expected = 0x7f, honest = 0x7f, saturated = 0x7f;
        if (!std::isnan(x)) {
            const size_t above =
                size_t(std::upper_bound(ascending.begin(), ascending.end(), magnitude) - ascending.begin());
            const size_t below = above - 1;  // 0 is among them
            const double next = above < ascending.size() ? ascending[above] : after;
            const double low = magnitude - ascending[below], high = next - magnitude;
            const size_t nearest = low < high ? below : low > high ? above : below % 2 == 0 ? below : above;
            const bool beyond = nearest >= ascending.size();
            honest = beyond ? (ieee ? 0x7c : 0x7f) : int(nearest);
            saturated = beyond ? int(ascending.size()) - 1 : int(nearest);
            expected = std::isinf(x) ? honest : saturated;
            expected |= sign, honest |= sign, saturated |= sign;
        }
        wrong += Format(x).bits != expected;
        wrong += Format(x, Overflow::honest).bits != honest;
        wrong += Format(x, Overflow::saturate).bits != saturated;
    });
    EXPECT(wrong == 0);
}

}  // namespace

TEST_CASE("E4M3: values, rounding to nearest even, overflow: the definition") { check_format<e4m3>(3, 7, false); }
TEST_CASE("E5M2: values, rounding to nearest even, overflow: the definition") { check_format<e5m2>(2, 15, true); }

TEST_CASE(
    "E4M3: the readable definition and the conversion without branches are the same for every fp32 that decides") {
    int64_t wrong = 0;
    for_deciding_floats([&](float x) { wrong += e4m3_by_definition(x) != e4m3(x).bits; });
    EXPECT(wrong == 0);
}

TEST_CASE("infinities and what is not a number stay visible in training, and only finite values saturate") {
    for (const float x : {INFINITY, -INFINITY, NAN, -NAN}) {
        EXPECT(!std::isfinite(float(e4m3(x))));
        EXPECT(!std::isfinite(float(e5m2(x))));
    }
    EXPECT(float(e4m3(1e30f)) == 448);
    EXPECT(float(e5m2(-1e30f)) == -57344);
    EXPECT(float(e4m3(0x1p-10f)) == 0);  // a tie between 0 and 2^-9: to even
    EXPECT(float(e4m3(0x1.01p-10f)) == 0x1p-9f);
}

TEST_CASE("E8M0: powers of two, up or down") {
    for (int code = 0; code < 255; ++code) {
        e8m0 scale;
        scale.bits = uint8_t(code);
        EXPECT(double(float(scale)) == std::ldexp(1.0, code - 127));
        EXPECT(e8m0(float(scale)).bits == code);
        EXPECT(e8m0(float(scale), false).bits == code);
    }
    EXPECT(float(e8m0(1.5f)) == 2);
    EXPECT(float(e8m0(1.5f, false)) == 1);
    EXPECT(float(e8m0(0.0f)) == 0x1p-127f);
    EXPECT(float(e8m0(INFINITY)) == 0x1p127f);
    EXPECT(std::isnan(float(e8m0(NAN))));
}

#if TRAIN70B_CUDA
namespace {
int64_t unlike_cuda(float x) {
    int64_t wrong = 0;
    wrong += e4m3(x, Overflow::saturate).bits != __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
    wrong += e4m3(x, Overflow::honest).bits != __nv_cvt_float_to_fp8(x, __NV_NOSAT, __NV_E4M3);
    wrong += e5m2(x, Overflow::saturate).bits != __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2);
    wrong += e5m2(x, Overflow::honest).bits != __nv_cvt_float_to_fp8(x, __NV_NOSAT, __NV_E5M2);
    wrong += e8m0(x).bits != __nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundPosInf);
    wrong += e8m0(x, false).bits != __nv_cvt_float_to_e8m0(x, __NV_SATFINITE, cudaRoundZero);
    return wrong;
}
}  // namespace

TEST_CASE("conversions are those of cuda_fp8.h: all that can decide, and every 251st fp32") {
    int64_t wrong = 0;
    for_deciding_floats([&](float x) { wrong += unlike_cuda(x); });
    if (kThorough)
        for (uint64_t bits = 0; bits < 1ull << 32; bits += 251) wrong += unlike_cuda(as_float(uint32_t(bits)));
    EXPECT(wrong == 0);
    for (int code = 0; code < 256; ++code) {
        const auto same = [](float a, const __half_raw& half) {
            const float b = __half2float(__half(half));
            return std::isnan(a) ? std::isnan(b) : a == b;
        };
        EXPECT(same(e4m3::of_bits(uint8_t(code)), __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t(code), __NV_E4M3)));
        EXPECT(same(e5m2::of_bits(uint8_t(code)), __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t(code), __NV_E5M2)));
        e8m0 scale;
        scale.bits = uint8_t(code);
        const float of_cuda = __bfloat162float(__nv_bfloat16(__nv_cvt_e8m0_to_bf16raw(__nv_fp8_storage_t(code))));
        EXPECT((std::isnan(of_cuda) ? std::isnan(float(scale)) : float(scale) == of_cuda));
    }
}

TEST_CASE("conversions are those of cuda_fp8.h: all 2^32 (about two minutes; run with --no-skip)" * doctest::skip()) {
    int64_t wrong = 0;
    for (uint64_t bits = 0; bits < 1ull << 32; ++bits) wrong += unlike_cuda(as_float(uint32_t(bits)));
    EXPECT(wrong == 0);
}
#endif
