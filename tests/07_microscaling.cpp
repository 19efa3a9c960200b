// MXFP8, NVFP4, INT8: formats, scales and products by their definition; random rounding; the Hadamard transform.
#include <numeric>

#include "07_fp8/complete/formats.h"
#include "07_fp8/complete/recipes.h"
#include "tests/support.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr double kE2M1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};  // OCP Microscaling Formats v1.0, table 5

// To nearest, ties to even; found by looking.
int e2m1_by_definition(double x) {
    int nearest = 0;
    for (int code = 1; code < 8; ++code) {
        const double here = std::abs(std::abs(x) - kE2M1[code]), best = std::abs(std::abs(x) - kE2M1[nearest]);
        if (here < best || (here == best && code % 2 == 0)) nearest = code;
    }
    return nearest + (std::signbit(x) ? 8 : 0);
}

// Numbers of many magnitudes.
Tensor spread(int64_t rows, int64_t cols, uint64_t key, DType dtype = DType::f32) {
    std::vector<double> x = randoms(rows * cols, key), exponent = randoms(rows * cols, key + 1000);
    for (size_t i = 0; i < x.size(); ++i) x[i] *= std::pow(10, 2 * exponent[i]);
    return tensor(x, {rows, cols}, dtype);
}

std::vector<double> turned(const std::vector<double>& x, int64_t rows, int64_t cols) {
    std::vector<double> to(x.size());
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < cols; ++c) to[size_t(c * rows + r)] = x[size_t(r * cols + c)];
    return to;
}

std::vector<double> transformed(const std::vector<double>& x) {
    std::vector<float> to(x.begin(), x.end());
    for (size_t i = 0; i < to.size(); i += 16) hadamard16(&to[i]);
    return {to.begin(), to.end()};
}

float largest_of(const std::vector<double>& x, int64_t cols, int64_t r0, int64_t height, int64_t c0, int64_t width) {
    double most = 0;
    for (int64_t r = r0; r < r0 + height; ++r)
        for (int64_t c = c0; c < c0 + width; ++c) most = std::max(most, std::abs(x[size_t(r * cols + c)]));
    return float(most);
}

}  // namespace

TEST_CASE("E2M1: the eight values of the OCP's table and their negatives; every tie, and what lies beside it") {
    for (int code = 0; code < 16; ++code) {
        const float value = float(kE2M1[code % 8]) * (code < 8 ? 1.0f : -1.0f);
        EXPECT(e2m1::value(uint8_t(code)) == value);
        EXPECT(e2m1(value).bits == code);
        EXPECT(e2m1(value, 0.0f).bits == code);  // what is exact stays, however the die falls
        EXPECT(e2m1(value, 0x1.fffffep-1f).bits == code);
    }
    for (int code = 0; code < 7; ++code) {
        const float tie = float(kE2M1[code] + kE2M1[code + 1]) / 2;
        for (const float sign : {1.0f, -1.0f}) {
            const int bit = sign < 0 ? 8 : 0;
            EXPECT(e2m1(sign * tie).bits == bit + code + code % 2);
            EXPECT(e2m1(sign * std::nextafter(tie, 0.0f)).bits == bit + code);
            EXPECT(e2m1(sign * std::nextafter(tie, 9.0f)).bits == bit + code + 1);
        }
    }
    for (const float x : {6.5f, 7.0f, 448.0f, 1e30f, INFINITY}) {
        EXPECT(float(e2m1(x)) == 6);
        EXPECT(float(e2m1(-x, 0.5f)) == -6);
    }
    EXPECT(float(e2m1(NAN)) == 0);  // no code for it: the scale says so
    int64_t wrong = 0;
    for (uint32_t upper = 0; upper < 0x10000; ++upper)
        for (const uint32_t lower : {0u, 1u, 0x8000u, 0xffffu}) {
            const float x = std::bit_cast<float>(upper << 16 | lower);
            if (!std::isnan(x)) wrong += e2m1(x).bits != e2m1_by_definition(std::clamp(double(x), -7.0, 7.0));
        }
    EXPECT(wrong == 0);
}

TEST_CASE("E2M1, rounded at random: one of the two around the number, and right in the mean") {
    constexpr int kDraws = 1 << 12;
    for (double x = -6; x <= 6; x += 0.0703125) {
        double sum = 0, low = 6, high = -6;
        for (int i = 0; i < kDraws; ++i) {
            const double value = double(float(e2m1(float(x), float(i) / kDraws)));
            sum += value, low = std::min(low, value), high = std::max(high, value);
        }
        INFO(x, " between ", low, " and ", high);
        EXPECT(std::abs(sum / kDraws - x) <= 2.0 / kDraws);
        EXPECT((low <= x && x <= high));
        EXPECT(e2m1_by_definition(high) - e2m1_by_definition(low) <= (x < 0 && low == 0 ? 8 : 1));
    }
}

TEST_CASE("MXFP8: a power of two per 32, rounded up, so that nothing saturates; codes by the definition") {
    for (const DType dtype : {DType::f32, DType::bf16}) {
        const int64_t rows = 64, cols = 96;
        Tensor x = spread(rows, cols, 3, dtype);
        const auto recipe = make_recipe({.recipe = "mxfp8"}, 3, Device::cpu, Comm());
        const QuantizedPair pair = recipe->quantize({Operand::gradient, 2}, x, Usage::both, true);
        for (const auto& [q, v, r, c] : {std::tuple(pair.rowwise, values(x), rows, cols),
                                         {pair.columnwise, turned(values(x), rows, cols), cols, rows}}) {
            int64_t wrong = 0;
            const Tensor scales = scales_of(q);
            for (int64_t i = 0; i < r; ++i)
                for (int64_t j = 0; j < c; j += 32) {
                    const float most = largest_of(v, c, i, 1, j, 32);
                    const double scale = std::exp2(std::ceil(std::log2(double(most) / 448)));
                    wrong += scales.data<float>()[q.layout().index(i, j)] != float(scale);
                    wrong += double(most) > 448 * scale || double(most) <= 224 * scale;
                    for (int64_t k = i * c + j; k < i * c + j + 32; ++k)
                        wrong += q.data.data<uint8_t>()[k] != e4m3(float(v[size_t(k)] / scale)).bits;
                }
            EXPECT(wrong == 0);
        }
    }
    Tensor edge = tensor(std::vector<double>(128, 0), {1, 128});
    edge.data<float>()[0] = 448, edge.data<float>()[32] = 448.5, edge.data<float>()[64] = 1e-40f;
    Quantized q = make_quantized(1, 128, DType::e4m3, Scaling::vec32, Device::cpu);
    quantize_blocks(q, edge, false, false, {});
    EXPECT(values(scales_of(q)) == std::vector<double>{1, 2, 0x1p-127, 0x1p-127});
    EXPECT(values(dequantized(q))[32] == 448);
    EXPECT(q.data.data<uint8_t>()[127] == 0);
}

TEST_CASE("NVFP4: E4M3 scales of the tensor's scale, amax / (6 * 448); weights and their transpose are the same data") {
    const int64_t rows = 48, cols = 80;
    const Tensor x = spread(rows, cols, 5);
    const std::vector<double> v = values(x);
    const auto recipe = make_recipe({.recipe = "nvfp4"}, 3, Device::cpu, Comm());
    for (const Operand::Role role : {Operand::input, Operand::weight}) {
        const QuantizedPair pair = recipe->quantize({role, int64_t(role)}, x, Usage::both, true);
        const int64_t height = role == Operand::weight ? 16 : 1;
        const std::vector<double> other = turned(v, rows, cols);
        for (const auto& [q, of, r, c] :
             {std::tuple(pair.rowwise, v, rows, cols),
              {pair.columnwise, role == Operand::weight ? other : transformed(other), cols, rows}}) {
            const float whole = largest_of(of, c, 0, r, 0, c), unit = q.tensor_scale.data<float>()[0];
            EXPECT(double(unit) == doctest::Approx(double(whole) / 2688).epsilon(1e-6).scale(0));
            int64_t wrong = 0, largest = 0;
            const Tensor scales = scales_of(q);
            for (int64_t i = 0; i < r; i += height)
                for (int64_t j = 0; j < c; j += 16) {
                    const float most = largest_of(of, c, i, height, j, 16);
                    const int64_t at = q.layout().index(i, j);
                    const uint8_t code = q.scale_inv.data<uint8_t>()[at];
                    wrong += code != e4m3(most / 6 / unit).bits;
                    largest += code == e4m3(448).bits;
                    const float scale = scales.data<float>()[at];
                    wrong += scale != float(e4m3::of_bits(code)) * unit;
                    for (int64_t k = i; k < i + height; ++k)
                        for (int64_t l = j; l < j + 16; ++l) {
                            const double number = of[size_t(k * c + l)];
                            wrong += q.data.data<uint8_t>()[k * c + l] != e2m1(float(number) * (1 / scale)).bits;
                            wrong += !(std::abs(values_of(DType::e2m1)[q.data.data<uint8_t>()[k * c + l]] * scale -
                                                float(number)) <= 1.07f * scale);  // half of 4 to 6, and E4M3's part
                        }
                }
            INFO("role ", int(role), ", ", r, " x ", c);
            EXPECT(wrong == 0);
            EXPECT(largest >= 1);  // the block of the tensor's amax
        }
        if (role == Operand::weight)
            EXPECT(values(dequantized(pair.columnwise)) == turned(values(dequantized(pair.rowwise)), rows, cols));
    }
}

TEST_CASE("the Hadamard transform: times its transpose the identity; it changes no product") {
    std::vector<double> matrix(256);
    for (size_t i = 0; i < 16; ++i) matrix[17 * i] = 1;
    matrix = transformed(matrix);  // row i: the transform of unit vector i
    int64_t minus = 0;
    for (size_t i = 0; i < 16; ++i)
        for (size_t j = 0; j < 16; ++j) {
            EXPECT(std::abs(matrix[16 * i + j]) == 0.25);
            EXPECT(std::inner_product(&matrix[16 * i], &matrix[16 * i] + 16, &matrix[16 * j], 0.0) == (i == j ? 1 : 0));
            minus += j == 0 && matrix[16 * i] < 0;
        }
    EXPECT(minus > 4);  // signs that are random
    EXPECT(minus < 12);

    // What the recipe does to the operands of dW, of small integers: exact, scales and all, but for the rounding to
    // four bits, so the product is exact where the transformed numbers have a code.
    const int64_t rows = 64, out = 16, in = 32;
    std::vector<double> dy(size_t(rows * out)), x(size_t(rows * in));
    for (size_t i = 0; i < dy.size(); ++i) dy[i] = double(random_bits(1, i) % 5) - 2;
    for (size_t i = 0; i < x.size(); ++i) x[i] = double(random_bits(2, i) % 5) - 2;
    const std::vector<double> a = turned(dy, rows, out), b = turned(x, rows, in);
    const std::vector<double> h_a = transformed(a), h_b = transformed(b);
    for (int64_t o = 0; o < out; ++o)
        for (int64_t i = 0; i < in; ++i)
            EXPECT(std::inner_product(&h_a[size_t(o * rows)], &h_a[size_t(o * rows)] + rows, &h_b[size_t(i * rows)],
                                      0.0) ==
                   std::inner_product(&a[size_t(o * rows)], &a[size_t(o * rows)] + rows, &b[size_t(i * rows)], 0.0));
    for (const DType dtype : {DType::f32, DType::bf16}) {  // and by the recipe: near it, as 4 bits allow
        const auto recipe = make_recipe({.recipe = "nvfp4"}, 3, Device::cpu, Comm());
        const Quantized q =
            recipe->quantize({Operand::gradient, 2}, tensor(dy, {rows, out}, dtype), Usage::both, true).columnwise;
        const Quantized p =
            recipe->quantize({Operand::input, 0}, tensor(x, {rows, in}, dtype), Usage::both, true).columnwise;
        Tensor c({out, in}, DType::f32, Device::cpu);
        scaled_matmul_into(c, q, p);
        std::vector<double> exact;
        for (int64_t o = 0; o < out; ++o)
            for (int64_t i = 0; i < in; ++i)
                exact.push_back(
                    std::inner_product(&a[size_t(o * rows)], &a[size_t(o * rows)] + rows, &b[size_t(i * rows)], 0.0));
        const double apart = distance(c, exact);
        INFO(apart);
        EXPECT(apart <= 0.3);
    }
}

TEST_CASE("gradients rounded at random: right in the mean over keys, and the same however the tensor is cut") {
    const int64_t rows = 64, cols = 64;
    Tensor x = tensor(randoms(rows * cols, 8), {rows, cols});
    scale(x, 0.75);
    for (int64_t i = 0; i < rows * cols; i += 16) x.data<float>()[i] = 0.75f;  // 6 scales of 256 / 2048, exactly
    const auto rounded = [](const Tensor& of, bool transposed, const StochasticRounding& random) {
        Quantized q = make_quantized(transposed ? of.cols() : of.rows(), transposed ? of.rows() : of.cols(),
                                     DType::e2m1, Scaling::vec16, Device::cpu);
        q.tensor_scale = tensor({1.0 / 2048}, {1});
        quantize_blocks(q, of, transposed, false, random);
        return values(dequantized(q));
    };
    const std::vector<double> v = values(x), nearest = rounded(x, false, {});
    std::vector<double> mean(v.size());
    constexpr int kKeys = 1024;
    for (int key = 1; key <= kKeys; ++key) {
        const std::vector<double> one = rounded(x, false, {.key = random_bits(7, uint64_t(key))});
        for (size_t i = 0; i < mean.size(); ++i) mean[i] += one[i] / kKeys;
    }
    // A step of E2M1 is up to a third of the block's largest, 0.25: a standard deviation is at most 0.125 / sqrt(1024).
    double bias = 0, farthest = 0, of_nearest = 0;
    for (size_t i = 0; i < mean.size(); ++i) {
        bias += (mean[i] - v[i]) / double(mean.size());
        farthest = std::max(farthest, std::abs(mean[i] - v[i]));
        of_nearest = std::max(of_nearest, std::abs(nearest[i] - v[i]));
    }
    INFO("mean ", bias, ", farthest ", farthest, ", to nearest ", of_nearest);
    EXPECT(std::abs(bias) <= 1e-4);
    EXPECT(farthest <= 0.02);
    EXPECT(of_nearest >= 0.1);

    for (const bool transposed : {false, true}) {
        const std::vector<double> whole = rounded(x, transposed, {.key = 9});
        const std::vector<double> straight = transposed ? turned(whole, cols, rows) : whole;
        EXPECT(straight != nearest);
        std::vector<double> parts;
        for (int64_t part = 0; part < 2; ++part) {
            const Tensor half = x.row_slice(32 * part, 32 * (part + 1));
            std::vector<double> each = rounded(half, transposed, {.key = 9, .row_begin = 32 * part});
            if (transposed) each = turned(each, cols, 32);
            parts.insert(parts.end(), each.begin(), each.end());
        }
        EXPECT(parts == straight);
        // Columns 16 to 31 and 48 to 63, as a rank of tensor parallelism has some of q and some of k.
        std::vector<double> some;
        std::vector<int64_t> outs;
        for (int64_t c = 0; c < cols; ++c)
            if (c / 16 % 2 == 1) outs.push_back(c);
        std::vector<double> expected;
        for (int64_t r = 0; r < rows; ++r)
            for (const int64_t c : outs) {
                some.push_back(v[size_t(r * cols + c)]);
                expected.push_back(straight[size_t(r * cols + c)]);
            }
        std::vector<double> got = rounded(tensor(some, {rows, 32}), transposed, {.key = 9, .cols = outs});
        EXPECT((transposed ? turned(got, 32, rows) : got) == expected);
    }
}

TEST_CASE("random numbers differ by step, by pass, by layer, by direction; and are drawn again alike") {
    const Tensor dy = tensor(randoms(32 * 32, 8), {32, 32});
    const auto draw = [&](int64_t step, int64_t passes, uint64_t key) {
        const auto recipe = make_recipe({.recipe = "nvfp4"}, 3, Device::cpu, Comm());
        recipe->begin_step(step);
        Operand operand{Operand::gradient, 2};
        operand.key = key;
        for (int64_t pass = 1; pass < passes; ++pass) recipe->quantize(operand, dy, Usage::both, true);
        const QuantizedPair pair = recipe->quantize(operand, dy, Usage::both, true);
        return std::pair(values(dequantized(pair.rowwise)), values(dequantized(pair.columnwise)));
    };
    const auto first = draw(1, 1, 1);
    EXPECT(draw(1, 1, 1) == first);
    for (const auto& other : {draw(2, 1, 1), draw(1, 2, 1), draw(1, 1, 2)}) {
        EXPECT(other.first != first.first);
        EXPECT(other.second != first.second);
    }
}

TEST_CASE("INT8: data by the definition; products of integers exact, beyond 2^31, too") {
    const int64_t rows = 24, cols = 48;
    const Tensor x = spread(rows, cols, 4);
    const auto recipe = make_recipe({.recipe = "int8"}, 3, Device::cpu, Comm());
    const Quantized q = recipe->quantize({Operand::gradient, 2}, x, Usage::rowwise, true).rowwise;
    for (int64_t r = 0; r < rows; ++r) {
        const float most = largest_of(values(x), cols, r, 1, 0, cols), scale = q.scale_inv.data<float>()[r];
        EXPECT(double(scale) == doctest::Approx(double(most) / 127).epsilon(1e-6).scale(0));
        for (int64_t c = r * cols; c < (r + 1) * cols; ++c)
            EXPECT(q.data.data<int8_t>()[c] == int(std::nearbyint(x.data<float>()[c] * (1 / scale))));
    }
    for (const int64_t k : {48, 512, 140000})
        for (const bool largest : {false, true}) {
            Quantized a = make_quantized(2, k, DType::i8, Scaling::row, Device::cpu), b = a;
            b.data = Tensor({3, k}, DType::i8, Device::cpu), b.scale_inv = tensor({1, 0.5, 2}, {3});
            a.scale_inv = tensor({1, 4}, {2});
            for (int64_t i = 0; i < 2 * k; ++i)
                a.data.data<int8_t>()[i] = largest ? 127 : int8_t(int(random_bits(1, uint64_t(i)) % 255) - 127);
            for (int64_t i = 0; i < 3 * k; ++i)
                b.data.data<int8_t>()[i] = largest ? 127 : int8_t(int(random_bits(2, uint64_t(i)) % 255) - 127);
            Tensor c = tensor({5, 5, 5, 5, 5, 5}, {2, 3});
            scaled_matmul_into(c, a, b, 1);
            for (int64_t m = 0; m < 2; ++m)
                for (int64_t n = 0; n < 3; ++n) {
                    int64_t sum = 0;
                    for (int64_t i = 0; i < k; ++i)
                        sum += int64_t(a.data.data<int8_t>()[m * k + i]) * b.data.data<int8_t>()[n * k + i];
                    const double scaled =
                        double(sum) * double(a.scale_inv.data<float>()[m]) * double(b.scale_inv.data<float>()[n]);
                    EXPECT(c.data<float>()[m * 3 + n] == float(scaled + 5));
                }
        }
}

TEST_CASE("what a GPU does not have is refused, by name; a product of unlike operands fails") {
    for (const char* name : {"mxfp8", "nvfp4", "int8"})
        EXPECT_USAGE_ERROR(
            make_recipe({.recipe = name}, 3, Device::cuda, Comm()),
            fmt::format("--fp8 {}: not supported with --device cuda, only on CPUs (try --fp8 blockwise)", name)
                .c_str());
    const auto of = [](const char* name) {
        return make_recipe({.recipe = name}, 3, Device::cpu, Comm())
            ->quantize({Operand::input, 0}, tensor(randoms(1024, 1), {32, 32}), Usage::rowwise, true)
            .rowwise;
    };
    Tensor c({32, 32}, DType::f32, Device::cpu);
    EXPECT_CHECK_FAILS(scaled_matmul_into(c, of("mxfp8"), of("nvfp4")));
    EXPECT_CHECK_FAILS(scaled_matmul_into(c, of("int8"), of("rowwise")));
    EXPECT_CHECK_FAILS(scaled_matmul_into(c, of("blockwise"), of("mxfp8")));
}
