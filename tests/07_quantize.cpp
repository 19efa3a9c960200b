// Casts, scales and products in 8 bits against their definition; the recipes' scales over steps.
#include <map>

#include "01_single_gpu/core/registry.h"
#include "07_fp8/complete/formats.h"
#include "07_fp8/complete/recipes.h"
#include "tests/support.h"

using namespace train70b;
using namespace train70b::test;

namespace {

const std::pair<int64_t, int64_t> kShapes[] = {{1, 1}, {16, 48}, {128, 256}, {130, 300}, {257, 96}};
const Scaling kScalings[] = {Scaling::tensor, Scaling::row, Scaling::vec128, Scaling::block128};

float code_value(DType format, uint8_t bits) {
    return format == DType::e4m3 ? float(e4m3::of_bits(bits)) : float(e5m2::of_bits(bits));
}
uint8_t code_of(DType format, float x) { return format == DType::e4m3 ? e4m3(x).bits : e5m2(x).bits; }

Tensor zeros(int64_t count) {
    Tensor x({count}, DType::f32, Device::cpu);
    fill(x, 0);
    return x;
}

// Numbers of many magnitudes.
std::vector<double> spread(int64_t count, uint64_t key) {
    std::vector<double> x = randoms(count, key), exponent = randoms(count, key + 1000);
    for (int64_t i = 0; i < count; ++i)
        x[size_t(i)] = double(float(x[size_t(i)] * std::pow(10, 3 * exponent[size_t(i)])));
    return x;
}

Quantized quantized(const Tensor& x, DType format, Scaling scaling) {
    Quantized q = make_quantized(x.rows(), x.cols(), format, scaling, x.device()), none;
    Tensor amax = zeros(q.scale_inv.size()), nothing;
    compute_amax(amax, nothing, x, scaling);
    compute_scale_inv(q.scale_inv, amax, format);
    cast(q, none, nothing, x);
    return q;
}

}  // namespace

TEST_CASE("amax, scale_inv and data, of a tensor and of its transpose: the definition, element by element") {
    for (const auto& [rows, cols] : kShapes)
        for (const DType dtype : {DType::f32, DType::bf16})
            for (const DType format : {DType::e4m3, DType::e5m2})
                for (const Scaling scaling : kScalings) {
                    INFO(rows, " x ", cols, " ", std::string(name_of(dtype)), " to ", std::string(name_of(format)),
                         " by ", std::string(name_of(scaling)));
                    const Tensor x = tensor(spread(rows * cols, 7), {rows, cols}, dtype);
                    const std::vector<double> v = values(x);
                    Quantized q = make_quantized(rows, cols, format, scaling, Device::cpu);
                    Quantized q_t = make_quantized(cols, rows, format, scaling, Device::cpu);
                    Tensor amax = zeros(q.scale_inv.size()), amax_t = zeros(q_t.scale_inv.size()), whole = zeros(1);
                    compute_amax(amax, amax_t, x, scaling);
                    compute_scale_inv(q.scale_inv, amax, format);
                    compute_scale_inv(q_t.scale_inv, amax_t, format);
                    cast(q, q_t, whole, x);

                    // Groups of elements by what the scaling means, not by the layout.
                    const auto group = [scaling](int64_t r, int64_t c) {
                        return std::pair(scaling == Scaling::tensor     ? 0
                                         : scaling == Scaling::block128 ? r / 128
                                                                        : r,
                                         scaling == Scaling::tensor || scaling == Scaling::row ? 0 : c / 128);
                    };
                    std::map<std::pair<int64_t, int64_t>, float> most, most_t;
                    float largest_of_all = 0;
                    for (int64_t r = 0; r < rows; ++r)
                        for (int64_t c = 0; c < cols; ++c) {
                            const float size = float(std::abs(v[size_t(r * cols + c)]));
                            most[group(r, c)] = std::max(most[group(r, c)], size);
                            most_t[group(c, r)] = std::max(most_t[group(c, r)], size);
                            largest_of_all = std::max(largest_of_all, size);
                        }
                    int64_t wrong = 0, wrong_t = 0;
                    const float unit = 1 / largest(format);
                    for (int64_t r = 0; r < rows; ++r)
                        for (int64_t c = 0; c < cols; ++c) {
                            const float here = most[group(r, c)] * unit, here_t = most_t[group(c, r)] * unit;
                            const float value = float(v[size_t(r * cols + c)]);
                            wrong += q.data.data<uint8_t>()[r * cols + c] != code_of(format, value * (1 / here));
                            wrong += q.scale_inv.data<float>()[q.layout().index(r, c)] != here;
                            wrong_t += q_t.data.data<uint8_t>()[c * rows + r] != code_of(format, value * (1 / here_t));
                            wrong_t += q_t.scale_inv.data<float>()[q_t.layout().index(c, r)] != here_t;
                        }
                    EXPECT(wrong == 0);
                    EXPECT(wrong_t == 0);
                    EXPECT(whole.data<float>()[0] == largest_of_all);
                    // What comes back is x to the format's precision, relative to the group's largest.
                    const Tensor back = dequantized(q);
                    EXPECT(code_value(format, q.data.data<uint8_t>()[0]) * q.scale_inv.data<float>()[0] ==
                           back.data<float>()[0]);
                    EXPECT(distance(back, v) <= (format == DType::e4m3 ? 0x1p-4 : 0x1p-3));
                }
}

TEST_CASE("scales of nothing, of tiny and of infinite amaxes are usable") {
    Tensor amax = tensor({0, 1e-44, 448, 3e38, 1}, {5}), scale = zeros(5);
    amax.data<float>()[4] = INFINITY;
    compute_scale_inv(scale, amax, DType::e4m3);
    EXPECT(scale.data<float>()[0] == 1);
    EXPECT(std::isfinite(1 / scale.data<float>()[1]));
    EXPECT(scale.data<float>()[2] == doctest::Approx(1));
    EXPECT(scale.data<float>()[3] == doctest::Approx(3e38 / 448));
    EXPECT(scale.data<float>()[4] == 1);
    compute_scale_inv(scale, amax, DType::e4m3, 3);
    EXPECT(scale.data<float>()[2] == doctest::Approx(8));
}

TEST_CASE("infinities and what is not a number reach the product, whatever the scaling") {
    for (const float bad : {INFINITY, -INFINITY, NAN})
        for (const DType format : {DType::e4m3, DType::e5m2})
            for (const Scaling scaling : kScalings) {
                Tensor x = tensor(randoms(128 * 128, 1), {128, 128});
                x.data<float>()[128 * 5 + 7] = bad;
                const Quantized q = quantized(x, format, scaling);
                const Scaling other = scaling == Scaling::block128 ? Scaling::vec128 : scaling;
                Tensor c({128, 128}, DType::f32, Device::cpu);
                scaled_matmul_into(c, q, quantized(tensor(randoms(128 * 128, 2), {128, 128}), DType::e4m3, other));
                INFO(double(bad), " in ", std::string(name_of(format)), " by ", std::string(name_of(scaling)));
                EXPECT(!std::isfinite(c.data<float>()[128 * 5]));
            }
}

TEST_CASE("the product is that of the dequantized operands in double, to 1e-6; added to what is there") {
    using Case = std::tuple<DType, Scaling, DType, Scaling>;
    for (const auto& [a_format, a_scaling, b_format, b_scaling] :
         {Case{DType::e4m3, Scaling::tensor, DType::e4m3, Scaling::tensor},
          Case{DType::e5m2, Scaling::tensor, DType::e4m3, Scaling::tensor},
          Case{DType::e4m3, Scaling::row, DType::e4m3, Scaling::row},
          Case{DType::e5m2, Scaling::row, DType::e4m3, Scaling::row},
          Case{DType::e4m3, Scaling::vec128, DType::e4m3, Scaling::block128},
          Case{DType::e4m3, Scaling::vec128, DType::e4m3, Scaling::vec128},
          Case{DType::e4m3, Scaling::block128, DType::e4m3, Scaling::vec128}})
        for (const auto& [m, n, k] : {std::tuple<int64_t, int64_t, int64_t>{16, 32, 48}, {128, 256, 384}, {33, 7, 300}})
            for (const float beta : {0.0f, 1.0f}) {
                const Quantized a = quantized(tensor(spread(m * k, 1), {m, k}), a_format, a_scaling);
                const Quantized b = quantized(tensor(spread(n * k, 2), {n, k}), b_format, b_scaling);
                const std::vector<double> start = randoms(m * n, 3);
                Tensor c = tensor(start, {m, n});
                scaled_matmul_into(c, a, b, beta);
                const std::vector<double> x = values(dequantized(a)), y = values(dequantized(b));
                std::vector<double> expected(size_t(m * n));
                for (int64_t i = 0; i < m; ++i)
                    for (int64_t j = 0; j < n; ++j) {
                        double sum = beta == 0 ? 0 : start[size_t(i * n + j)];
                        for (int64_t l = 0; l < k; ++l) sum += x[size_t(i * k + l)] * y[size_t(j * k + l)];
                        expected[size_t(i * n + j)] = sum;
                    }
                INFO(std::string(name_of(a_scaling)), " ", std::string(name_of(b_scaling)), " ", m, " x ", n, " x ", k,
                     ": ", distance(c, expected));
                EXPECT(distance(c, expected) <= 1e-6);
            }
    const Quantized a = quantized(tensor(randoms(256, 1), {16, 16}), DType::e5m2, Scaling::tensor);
    Tensor c({16, 16}, DType::f32, Device::cpu);
    EXPECT_CHECK_FAILS(scaled_matmul_into(c, a, a));  // no e5m2 by e5m2
    EXPECT_CHECK_FAILS(
        scaled_matmul_into(c, a, quantized(tensor(randoms(256, 1), {16, 16}), DType::e4m3, Scaling::row)));
}

TEST_CASE("the transpose of FP8 data") {
    Tensor from = tensor(randoms(130 * 70, 4), {130, 70});
    Quantized q = quantized(from, DType::e4m3, Scaling::tensor);
    Tensor to({70, 130}, DType::e4m3, Device::cpu);
    transpose_fp8(to, q.data);
    int64_t wrong = 0;
    for (int64_t r = 0; r < 130; ++r)
        for (int64_t c = 0; c < 70; ++c) wrong += to.data<uint8_t>()[c * 130 + r] != q.data.data<uint8_t>()[r * 70 + c];
    EXPECT(wrong == 0);
}

// ---- recipes --------------------------------------------------------------------------------------------------------

namespace {
double error_of(const Quantized& q, const Tensor& x) { return distance(dequantized(q), values(x)); }

// A delayed recipe and the tensors it meets, one per step.
struct Steps {
    DelayedScaling recipe;
    Operand operand{Operand::gradient, 2};
    explicit Steps(int64_t history, int64_t margin = 0)
        : recipe({.recipe = "delayed", .history = history, .margin = margin}, 3, Device::cpu, Comm()) {}
    Quantized step(const Tensor& x, bool training = true) {
        const Quantized q = recipe.quantize(operand, x, Usage::rowwise, training, Memory::workspace).rowwise;
        const Quantized kept{q.data, tensor(values(q.scale_inv), {1}), q.scaling};  // the recipe's may change
        recipe.next_step();
        return kept;
    }
    float scale() const { return recipe.scale_inv(2); }
};
Tensor normal(double size, uint64_t key = 1) {
    std::vector<double> x = randoms(4096, key);
    for (double& value : x) value *= size;
    return tensor(x, {64, 64});
}
}  // namespace

TEST_CASE("delayed: the first tensor is scaled by itself, later ones by the largest of the history") {
    Steps steps(3);
    EXPECT(steps.scale() == 0);
    EXPECT(error_of(steps.step(normal(1e-6)), normal(1e-6)) <= 0.1);
    const float first = steps.scale();
    EXPECT(first == doctest::Approx(1e-6 / 57344).epsilon(0.01).scale(0));
    steps.step(normal(2e-6));
    EXPECT(steps.scale() == doctest::Approx(2e-6 / 57344).epsilon(0.01).scale(0));
    for (int i = 0; i < 2; ++i) steps.step(normal(1e-6));
    EXPECT(steps.scale() == doctest::Approx(2e-6 / 57344).epsilon(0.01).scale(0));  // still among the last three
    steps.step(normal(1e-6));
    EXPECT(steps.scale() == first);
    Steps roomy(3, 2);
    roomy.step(normal(1e-6));
    EXPECT(roomy.scale() == doctest::Approx(4e-6 / 57344).epsilon(0.01).scale(0));
}

TEST_CASE("delayed: an outlier saturates, costs the small ones their precision for the history's length, and is over") {
    Steps steps(4);
    const Tensor usual = normal(1);
    for (int i = 0; i < 5; ++i) steps.step(usual);
    const double before = error_of(steps.step(usual), usual);
    EXPECT(before <= 0.1);
    Tensor outlier = tensor(values(usual), {64, 64});
    outlier.data<float>()[100] = 1e11f;
    const Quantized hit = steps.step(outlier);
    const Tensor back = dequantized(hit);
    EXPECT(std::isfinite(back.data<float>()[100]));  // saturated: as large as it can be said
    EXPECT(back.data<float>()[100] == doctest::Approx(1).epsilon(0.2));
    for (int i = 0; i < 4; ++i) {
        const Quantized after = steps.step(usual);
        EXPECT(error_of(after, usual) > 0.5);  // below half of the smallest code, nearly all of it
    }
    EXPECT(error_of(steps.step(usual), usual) == before);
}

TEST_CASE("delayed: all zeros leave the scale alone, at the beginning and later; so does what is not finite") {
    Steps steps(2);
    const Tensor zero = normal(0), usual = normal(1e-5);
    for (int i = 0; i < 4; ++i) {
        const Quantized q = steps.step(zero);
        EXPECT(steps.scale() == 0);
        EXPECT(error_of(q, zero) == 0);
    }
    EXPECT(error_of(steps.step(usual), usual) <= 0.1);
    const float scale = steps.scale();
    for (int i = 0; i < 4; ++i) steps.step(zero);
    EXPECT(steps.scale() == scale);
    EXPECT(error_of(steps.step(usual), usual) <= 0.1);
    Tensor broken = tensor(values(usual), {64, 64});
    broken.data<float>()[3] = NAN;
    broken.data<float>()[4] = INFINITY;
    const Quantized q = steps.step(broken);
    EXPECT(!std::isfinite(dequantized(q).data<float>()[3]));
    EXPECT(!std::isfinite(dequantized(q).data<float>()[4]));
    EXPECT(steps.scale() == scale);
    EXPECT(error_of(steps.step(usual), usual) <= 0.1);
}

TEST_CASE("delayed: what is not training leaves no trace") {
    Steps steps(2);
    steps.step(normal(1));
    const float scale = steps.scale();
    steps.step(normal(100), false);
    EXPECT(steps.scale() == scale);
}

TEST_CASE("recipes: an unknown one is a usage error") {
    EXPECT_USAGE_ERROR(make_recipe({.recipe = "none"}, 3, Device::cpu, Comm()), "--fp8 none: unknown; must be one of");
}

TEST_CASE("recipes: formats, scalings, transposes") {
    for (const std::string& name : names_of(fp8_recipes())) {
        const auto recipe = make_recipe({.recipe = name}, 3, Device::cpu, Comm());
        const bool blockwise = name == "blockwise", mx = name == "mxfp8", nvfp4 = name == "nvfp4";
        const double tolerance = nvfp4 ? 0.25 : 0.1;
        for (const Operand::Role role : {Operand::input, Operand::weight, Operand::gradient}) {
            const Tensor x = tensor(spread(256 * 128, 5), {256, 128});
            const QuantizedPair pair = recipe->quantize({role, int64_t(role)}, x, Usage::both, true);
            INFO(name, ", role ", int(role));
            const DType fp8 = role == Operand::gradient && !blockwise && !mx ? DType::e5m2 : DType::e4m3;
            EXPECT(pair.rowwise.data.dtype() == (nvfp4 ? DType::e2m1 : name == "int8" ? DType::i8 : fp8));
            const bool by_rows = name == "rowwise" || name == "int8", weight = role == Operand::weight;
            const Scaling blocks =
                weight ? (nvfp4 ? Scaling::block16 : Scaling::block128) : (nvfp4 ? Scaling::vec16 : Scaling::vec128);
            EXPECT(pair.rowwise.scaling == (mx                   ? Scaling::vec32
                                            : blockwise || nvfp4 ? blocks
                                            : by_rows            ? Scaling::row
                                                                 : Scaling::tensor));
            EXPECT(recipe->scaling(role) == pair.rowwise.scaling);
            EXPECT(pair.columnwise.data.shape() == Shape{128, 256});
            std::vector<double> turned(256 * 128);
            const std::vector<double> v = values(x);
            for (int64_t r = 0; r < 256; ++r)
                for (int64_t c = 0; c < 128; ++c) turned[size_t(c * 256 + r)] = v[size_t(r * 128 + c)];
            if (nvfp4 && !weight) {
                std::vector<float> numbers(turned.begin(), turned.end());
                for (size_t i = 0; i < numbers.size(); i += 16) hadamard16(&numbers[i]);
                turned.assign(numbers.begin(), numbers.end());
            }
            EXPECT(distance(dequantized(pair.rowwise), values(x)) <= tolerance);
            EXPECT(distance(dequantized(pair.columnwise), turned) <= tolerance);
            const auto again = make_recipe({.recipe = name}, 3, Device::cpu, Comm());
            const QuantizedPair alone = again->quantize({role, int64_t(role)}, x, Usage::columnwise, true);
            EXPECT(!alone.rowwise);
            EXPECT(values(dequantized(alone.columnwise)) == values(dequantized(pair.columnwise)));
        }
    }
}
