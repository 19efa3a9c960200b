#include "01_single_gpu/core/cpu.h"
#include "tests/ops.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("fill, scale, add, copy and sum of squares") {
    for (const auto& [dtype, forward, gradient] : kAccuracies) {
        INFO("fill, scale, add, copy, sum_squares: " << name_of(dtype));
        const int64_t n = 40001;  // more than one part per thread, and a remainder
        const Doubles a = randoms(n, 1, dtype), b = randoms(n, 2, dtype);
        Tensor x = tensor(a, {n}, dtype);
        const Tensor y = tensor(b, {n}, dtype);
        Tensor sum = empty({n}, dtype), out = empty({1}, DType::f64);
        add(sum, x, y);
        Doubles expected(n);
        for (int64_t i = 0; i < n; ++i) expected[i] = a[i] + b[i];
        EXPECT(distance(sum, expected) <= forward);
        add(x, x, y);  // in place
        EXPECT(values(x) == values(sum));
        sum_squares(out, sum);
        EXPECT(std::abs(read(out)[0] / dot(expected, expected) - 1) <= forward);
        scale(sum, -0.3);
        for (double& v : expected) v *= -0.3;
        EXPECT(distance(sum, expected) <= forward);
        Tensor narrow = empty({n}, DType::bf16), back = empty({n}, dtype);
        copy(narrow, sum);
        copy(back, narrow);
        EXPECT(distance(back, expected) <= 3e-3);
        EXPECT(distance(back, expected) > 1e-4);
        fill(narrow, 1.5);
        EXPECT(distance(narrow, Doubles(n, 1.5)) == 0);
        fill(back, 0.1);
        EXPECT(distance(back, Doubles(n, 0.1)) <= forward);
    }
}

TEST_CASE("bf16 rounds to nearest even and keeps NaN") {
    Tensor narrow = empty({6}, DType::bf16);
    copy(narrow, tensor({1 + 0x1p-8, 1 + 3 * 0x1p-8, 1 + 0x1p-8 + 0x1p-16, -0.0, NAN, 3.4e38}, {6}));
    const Doubles got = values(narrow);
    EXPECT(got[0] == 1.0);             // a tie goes to the even neighbour below
    EXPECT(got[1] == 1 + 4 * 0x1p-8);  // and to the even one above
    EXPECT(got[2] == 1 + 2 * 0x1p-8);  // just over the tie
    EXPECT(std::signbit(got[3]));
    EXPECT(std::isnan(got[4]));
    EXPECT(std::isinf(got[5]));  // beyond bf16's largest finite number
}

TEST_CASE("blocks exchanged: (a, b, w) to (b, a, w), of any dtype, there and back") {
    for (DType dtype : {DType::f32, DType::bf16})
        for (auto [a, b, w] : {std::array<int64_t, 3>{2, 3, 4}, {5, 1, 3}, {1, 7, 2}, {4, 8, 16}}) {
            INFO("swap_blocks " << name_of(dtype) << " (" << a << ", " << b << ", " << w << ")");
            const Tensor from = tensor(randoms(a * b * w, 1), {a, b, w}, dtype);
            Tensor to({b, a, w}, dtype, Device::cpu), back = Tensor::like(from);
            swap_blocks(to, from, a, b);
            const Doubles x = values(from), y = values(to);
            for (int64_t i = 0; i < a; ++i)
                for (int64_t j = 0; j < b; ++j)
                    for (int64_t k = 0; k < w; ++k) EXPECT(y[(j * a + i) * w + k] == x[(i * b + j) * w + k]);
            swap_blocks(back, to, b, a);
            EXPECT(values(back) == x);
        }
}

TEST_CASE("the exponentials that vectorise: to the last bits everywhere, 0 and infinity beyond, NaN for NaN") {
    double worst_float = 0, worst = 0;
    for (int i = 0; i < 200000; ++i) {
        const double x = (double(random_bits(1, i) >> 11) * 0x1p-52 - 1) * 707;
        worst = std::max(worst, std::abs(cpu::exp_simd(x) / std::exp(x) - 1));
        const float y = float(x / 8.1);
        worst_float = std::max(worst_float, std::abs(double(cpu::exp_simd(y)) / std::exp(double(y)) - 1));
    }
    EXPECT(worst <= 4e-16);
    EXPECT(worst > 0);  // or something else was measured
    EXPECT(worst_float <= 2e-7);
    EXPECT(cpu::exp_simd(0.0) == 1);
    EXPECT((cpu::exp_simd(-1e3) == 0 && cpu::exp_simd(-INFINITY * 1.0) == 0));
    EXPECT((cpu::exp_simd(1e3) == INFINITY && cpu::exp_simd(INFINITY * 1.0) == INFINITY));
    EXPECT(std::isnan(cpu::exp_simd(std::nan(""))));
    EXPECT((cpu::exp_simd(0.0f) == 1 && cpu::exp_simd(-88.f) == 0 && cpu::exp_simd(-1e30f) == 0));
    EXPECT((cpu::exp_simd(-INFINITY) == 0 && cpu::exp_simd(1e30f) == INFINITY && cpu::exp_simd(INFINITY) == INFINITY));
    EXPECT(std::isnan(cpu::exp_simd(std::nanf(""))));
}

TEST_CASE("elementwise: shapes, dtypes and devices that do not fit are refused") {
    Tensor a = zeros({2, 3}), c = zeros({2, 2}), one = zeros({1}), far({2, 3}, DType::f32, Device::meta);
    EXPECT_CHECK_FAILS(add(a, a, c));
    EXPECT_CHECK_FAILS(add(a, a, far));
    EXPECT_CHECK_FAILS(sum_squares(one, zeros({2, 2}, DType::f64)));  // the sum is fp64
}
