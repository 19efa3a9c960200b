// Grades the lab blockwise-scale.
#include <map>

#include "07_fp8/complete/recipes.h"
#include "tests/labs.h"

using namespace train70b;
using namespace train70b::test;

namespace {

Tensor filled(int64_t count, double value) {
    Tensor x({count}, DType::f32, Device::cpu);
    fill(x, float(value));
    return x;
}

Quantized quantized(const Tensor& x, Operand::Role role) {
    return make_recipe({.recipe = "blockwise"}, 3, Device::cpu, Comm())
        ->quantize({.role = role, .index = int64_t(role)}, x, Usage::rowwise, true)
        .rowwise;
}

// Blocks of 1 or 128 rows by 128 columns: the amax of the block of (r, c).
double amax_of_block(const std::vector<double>& x, int64_t rows, int64_t cols, int64_t high, int64_t r, int64_t c) {
    double most = 0;
    for (int64_t i = r / high * high; i < std::min(rows, r / high * high + high); ++i)
        for (int64_t j = c / 128 * 128; j < std::min(cols, c / 128 * 128 + 128); ++j)
            most = std::max(most, std::abs(x[size_t(i * cols + j)]));
    return most;
}

}  // namespace

TEST_CASE("lab: who shares a scale") {
    const int64_t rows = 256, cols = 384;
    const Tensor x = tensor(randoms(rows * cols, 1), {rows, cols});
    const auto scales = [&](const char* what, Operand::Role role, int64_t expected, const std::string& formula) {
        const Quantized q = quantized(x, role);
        figure(fmt::format("scales of {} of 256 x 384", what), q.scale_inv.size(), expected, "", formula,
               q.scale_inv.size() == 1      ? "One scale for the entire tensor: that is `current`."
               : q.scale_inv.size() == rows ? "One scale per row: that is `rowwise`."
               : role == Operand::weight    ? "Weights have one scale per 128 x 128."
                                            : "Activations and gradients have one scale per 1 x 128.");
        expect_none_wrong(
            q.data.dtype() == DType::e4m3 ? "" : fmt::format("{} in {}, not in e4m3", what, name_of(q.data.dtype())));
    };
    scales("activations", Operand::input, rows * (cols / 128), "rows * cols / 128");
    scales("weights", Operand::weight, rows / 128 * 4, "rows / 128 * 4: cols / 128, padded to a multiple of 4");
    scales("gradients", Operand::gradient, rows * (cols / 128), "rows * cols / 128");
}

TEST_CASE("lab: the amax of each block") {
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{128, 256}, {130, 300}, {3, 129}})
        for (const Scaling scaling : {Scaling::vec128, Scaling::block128}) {
            const std::vector<double> v = randoms(rows * cols, 2);
            const Tensor x = tensor(v, {rows, cols});
            const ScaleLayout layout{scaling, rows, cols}, layout_t{scaling, cols, rows};
            Tensor amax = filled(layout.size(), 0), amax_t = filled(layout_t.size(), 0);
            compute_amax(amax, amax_t, x, scaling);
            std::vector<double> turned(v.size());
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t c = 0; c < cols; ++c) turned[size_t(c * rows + r)] = v[size_t(r * cols + c)];
            const int64_t high = scaling == Scaling::vec128 ? 1 : 128;
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t c = 0; c < cols; ++c) {
                    const std::string where =
                        fmt::format("{} x {} by {}: the amax of element ({}, {})", rows, cols, name_of(scaling), r, c);
                    const double got = amax.data<float>()[layout.index(r, c)],
                                 got_t = amax_t.data<float>()[layout_t.index(c, r)];
                    const double expected = amax_of_block(v, rows, cols, high, r, c);
                    const double expected_t = amax_of_block(turned, cols, rows, high, c, r);
                    if (got != expected)
                        return expect_none_wrong(fmt::format("{} is {:.6g}, expected {:.6g}", where, got, expected));
                    if (got_t != expected_t)
                        return expect_none_wrong(
                            fmt::format("{} in the transpose is {:.6g}, expected {:.6g}", where, got_t, expected_t));
                }
        }
}

TEST_CASE("lab: what is in the amax stays, and either may be empty") {
    const Tensor x = tensor(randoms(2 * 256, 3), {2, 256});
    Tensor amax = filled(4, 7), none;
    compute_amax(amax, none, x, Scaling::vec128);
    expect_none_wrong(amax.data<float>()[2] == 7 ? "" : fmt::format("an amax of 7 became {}", amax.data<float>()[2]));
    Tensor infinite = tensor(randoms(2 * 128, 3), {2, 128}), most = filled(2, 0);
    infinite.data<float>()[1] = NAN, infinite.data<float>()[129] = INFINITY;
    compute_amax(most, none, infinite, Scaling::vec128);
    for (int i = 0; i < 2; ++i)
        expect_none_wrong(std::isfinite(most.data<float>()[i]) ? "an infinity or NaN in x is not in its amax" : "");
}

TEST_CASE("lab: scales") {
    Tensor amax = tensor({896, 0, 1e-44, INFINITY, 1}, {5}), scale = filled(5, -1);
    amax.data<float>()[4] = NAN;
    compute_scale_inv(scale, amax, DType::e4m3);
    const auto of = [&](int i) { return double(scale.data<float>()[i]); };
    figure("scale_inv of amax 896", of(0), 2.0, "", "amax / 448",
           of(0) == 0.5 ? "That is its inverse, Transformer Engine's `scale`." : "", 1e-6);
    figure("scale_inv of zeros", of(1), 1.0, "", "1", "Zeros: 1 / 0 is infinite, and 0 times that is not a number.");
    expect_none_wrong(std::isfinite(1 / float(of(2))) && of(2) > 0
                          ? ""
                          : fmt::format("amax 1e-44: scale_inv {:g}, and 1 / scale_inv is infinite", of(2)));
    for (const int i : {3, 4})
        expect_none_wrong(
            of(i) == 1 ? "" : fmt::format("amax {}: scale_inv {:g}, expected 1", i == 3 ? "infinite" : "NaN", of(i)));
}

// The error of what does not share a scale with the outlier is as if there were none.
TEST_CASE("lab: what an outlier costs") {
    const int64_t rows = 4, cols = 512;
    std::vector<double> v = randoms(rows * cols, 4);
    for (double& each : v) each = double(float(each * 1e-3));
    const auto others = [&](const Tensor& x) {  // the relative error of all rows but the outlier's
        std::vector<double> back = values(dequantized(quantized(x, Operand::input)));
        back.erase(back.begin(), back.begin() + 128);
        return distance(back, std::vector<double>(v.begin() + 128, v.end()));
    };
    const double before = others(tensor(v, {rows, cols}));
    std::vector<double> spoiled = v;
    spoiled[5] = 3e4;
    const double after = others(tensor(spoiled, {rows, cols}));
    figure("relative error of the other blocks, with an outlier of 3e4 in one", after, before, "",
           fmt::format("{:.2g}, as without it", before),
           after > 0.5 ? "The outlier's scale is also that of other blocks, whose values round to 0." : "", 1e-9);
    expect_none_wrong(before <= 0x1p-4
                          ? ""
                          : fmt::format("without the outlier the relative error is {:.2g}, more than 2^-4", before));
}
