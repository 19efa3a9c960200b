// Grades the lab e4m3-rounding.
#include "07_fp8/complete/formats.h"
#include "tests/labs.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// Of a seed: the exponent's bias, where ties go, and what becomes of a finite number beyond the largest.
const int kBias = std::stoi(drawn("LAB_BIAS", "7"));
const std::string kTies = drawn("LAB_TIES", "to the one whose last mantissa bit is 0");
const bool kSaturates = drawn("LAB_BEYOND", "the largest value") == "the largest value";
const float kUnit = std::ldexp(1.0f, 7 - kBias);  // E4M3's own values, times this, are these

// The value of a code, from the table of the task.
double value_of(int code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double size =
        exponent == 0 ? std::ldexp(mantissa / 8.0, 1 - kBias) : std::ldexp(1 + mantissa / 8.0, exponent - kBias);
    return code & 0x80 ? -size : size;
}

std::string text_of(int code) {
    if ((code & 0x7f) == 0x7f) return fmt::format("0x{:02x} (not a number)", code);
    return fmt::format("0x{:02x} ({:g})", code, value_of(code));
}

struct Expected {
    float x;
    int code;
};
// The first that is wrong: "1.0625 becomes 0x39 (1.125), expected 0x38 (1)".
void expect_codes(const std::vector<Expected>& list) {
    for (const auto& [x, code] : list)
        if (const int got = e4m3_by_definition(x); got != code)
            return expect_none_wrong(fmt::format("{:.9g} becomes {}, expected {}", x, text_of(got), text_of(code)));
}

constexpr int kSmallestNormal = 0x08, kLargest = 0x7e;

// Of the tie between a code and the next.
int of_tie(int code) {
    const bool away = kTies == "away from zero", to_zero = kTies == "towards zero";
    return away ? code + 1 : to_zero ? code : code + code % 2;
}

}  // namespace

TEST_CASE("lab: normal values") {
    std::vector<Expected> list;
    for (int code = kSmallestNormal; code <= kLargest; ++code) list.push_back({float(value_of(code)), code});
    expect_codes(list);
}

TEST_CASE("lab: nearest") {
    std::vector<Expected> list;
    for (int code = kSmallestNormal; code < kLargest; ++code) {
        const double low = value_of(code), gap = value_of(code + 1) - low;
        for (const double share : {0.01, 0.3, 0.49}) list.push_back({float(low + share * gap), code});
        for (const double share : {0.51, 0.7, 0.99}) list.push_back({float(low + share * gap), code + 1});
    }
    double worst = 0;
    for (const auto& [x, code] : list)
        worst = std::max(worst, std::abs(value_of(e4m3_by_definition(x)) - double(x)) / double(x));
    // Near the middle of the two codes above a power of two: 0.49 of a gap of 1/8, relative to 1 + 0.49 / 8.
    figure("largest relative error at 0.49 and 0.51 of a gap", worst, 0.49 / 8 / (1 + 0.49 / 8), "",
           "0.49 2^-3 / (1 + 0.49 2^-3)",
           worst > 0.07 && worst <= 0.126 ? "Twice the error of rounding to nearest: the last bits are cut off." : "",
           1e-4);
    expect_codes(list);
}

TEST_CASE("lab: ties") {
    std::vector<Expected> list;
    int64_t up = 0, expected = 0;
    for (int code = kSmallestNormal; code < kLargest; ++code) {
        const float tie = float((value_of(code) + value_of(code + 1)) / 2);
        list.push_back({tie, of_tie(code)});
        expected += of_tie(code) > code;
        up += std::abs(value_of(e4m3_by_definition(tie))) > double(tie);
    }
    const int64_t all = kLargest - kSmallestNormal;
    figure(
        "ties that are rounded up", up, expected, "",
        fmt::format("{} of {}", expected == all / 2 ? "half" : kTies, all),
        expected != all / 2 ? "Your seed's ties go elsewhere."
        : up == all
            ? "Ties go away from zero: a sum of many roundings is then too large. nearbyint rounds them to even, round "
              "does not."
        : up == 0 ? "All ties are rounded down."
                  : "");
    list.push_back({0x1p-10f * kUnit, of_tie(0)});  // between 0 and 2^-9
    expect_codes(list);
}

TEST_CASE("lab: subnormal numbers") {
    std::vector<Expected> list;
    for (int code = 1; code < kSmallestNormal; ++code) {
        list.push_back({float(value_of(code)), code});
        list.push_back({float(-value_of(code) - 0.2 * value_of(1)), 0x80 | code});
    }
    list.push_back({0x1.cap-7f * kUnit, 7});  // between the largest subnormal and the smallest normal number
    list.push_back({1e-8f * kUnit, 0});
    expect_codes(list);
}

TEST_CASE("lab: overflow") {
    const int beyond = kSaturates ? kLargest : 0x7f;
    expect_codes({{448 * kUnit, kLargest},
                  {463 * kUnit, beyond},
                  {464 * kUnit, beyond},  // would be a tie with 480, which is not a number
                  {465 * kUnit, beyond},
                  {1000 * kUnit, beyond},
                  {-3e38f, 0x80 | beyond},
                  {INFINITY, 0x7f},
                  {-INFINITY, 0xff}});
}

TEST_CASE("lab: signs and what is not a number") {
    expect_codes({{0.0f, 0},
                  {-0.0f, 0x80},
                  {-1 * kUnit, 0xb8},
                  {-448 * kUnit, 0xfe},
                  {-1e-30f, 0x80},
                  {NAN, 0x7f},
                  {-NAN, 0x7f}});
}
