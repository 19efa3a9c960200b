#include "tests/ops.h"

using namespace train70b;
using namespace train70b::test;

namespace {

Doubles matmul_double(const Doubles& a, const Doubles& b, int64_t m, int64_t n, int64_t k, Transpose t) {
    Doubles c(m * n);
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j)
            for (int64_t l = 0; l < k; ++l)
                c[i * n + j] += (t == Transpose::a ? a[l * m + i] : a[i * k + l]) *
                                (t == Transpose::b ? b[j * k + l] : b[l * n + j]);
    return c;
}

}  // namespace

TEST_CASE("matmul: all three orientations, odd sizes, accumulation") {
    for (const auto& [dtype, forward, gradient] : kAccuracies) {
        for (Transpose t : {Transpose::none, Transpose::a, Transpose::b})
            for (auto [m, n, k] : {std::array<int64_t, 3>{5, 7, 3}, {1, 9, 17}, {65, 33, 129}}) {
                INFO("matmul " << name_of(dtype) << ", transpose " << int(t) << ", M " << m << " N " << n << " K "
                               << k);
                const Doubles a = randoms(m * k, 1, dtype), b = randoms(k * n, 2, dtype), c0 = randoms(m * n, 3, dtype);
                const Shape a_shape = t == Transpose::a ? Shape{k, m} : Shape{m, k};
                const Shape b_shape = t == Transpose::b ? Shape{n, k} : Shape{k, n};
                Doubles expected = matmul_double(a, b, m, n, k, t);
                EXPECT(distance(matmul(tensor(a, a_shape, dtype), tensor(b, b_shape, dtype), t), expected) <= forward);
                Tensor c = tensor(c0, {m, n}, dtype);
                matmul_into(c, tensor(a, a_shape, dtype), tensor(b, b_shape, dtype), t, 1);
                for (int64_t i = 0; i < m * n; ++i) expected[i] += c0[i];
                EXPECT(distance(c, expected) <= forward);
            }
    }
}

TEST_CASE("matmul: bf16 inputs into an fp32 sum equal the product of the rounded inputs") {
    const int64_t m = 9, n = 10, k = 33;
    const Tensor a = tensor(randoms(m * k, 1), {m, k}, DType::bf16), b = tensor(randoms(n * k, 2), {n, k}, DType::bf16);
    const Doubles expected = matmul_double(values(a), values(b), m, n, k, Transpose::b);
    Tensor wide = empty({m, n});
    matmul_into(wide, a, b, Transpose::b);
    EXPECT(distance(wide, expected) <= kForward);
    EXPECT(distance(matmul(a, b, Transpose::b), expected) <= 4e-3);  // the result rounded to bf16
}

TEST_CASE("matmul: what was in c does not matter with beta 0, and does with beta 1") {
    Tensor c = empty({2, 2}), nan = empty({2, 2});
    fill(c, NAN);
    const Tensor one = tensor({1, 0, 0, 1}, {2, 2});
    matmul_into(c, one, one);
    EXPECT(distance(c, {1, 0, 0, 1}) == 0);
    fill(nan, NAN);
    matmul_into(nan, one, one, Transpose::none, 1);
    EXPECT(std::isnan(read(nan)[0]));
}

TEST_CASE("matmul: gradients of both inputs") {
    for (const auto& [dtype, forward, gradient] : kAccuracies) {
        INFO("matmul, gradients, " << name_of(dtype));
        const int64_t m = 4, n = 3, k = 5;
        const Doubles x = randoms(m * k, 1, dtype), w = randoms(n * k, 2, dtype), dy = randoms(m * n, 3, dtype);
        const Tensor tx = tensor(x, {m, k}, dtype), tw = tensor(w, {n, k}, dtype), tdy = tensor(dy, {m, n}, dtype);
        const auto y = [&](const Doubles& x, const Doubles& w) {
            return dot(matmul_double(x, w, m, n, k, Transpose::b), dy);
        };
        EXPECT(distance(matmul(tdy, tw), differentiate([&](const Doubles& v) { return y(v, w); }, x)) <= gradient);
        EXPECT(distance(matmul(tdy, tx, Transpose::a), differentiate([&](const Doubles& v) { return y(x, v); }, w)) <=
               gradient);
    }
}

TEST_CASE("matmul: shapes and dtypes that do not fit are refused") {
    Tensor a = zeros({2, 3}), b = zeros({4, 2}), c = zeros({2, 2}), half = zeros({2, 3}, DType::bf16);
    EXPECT_CHECK_FAILS(matmul(a, b));
    EXPECT_CHECK_FAILS(matmul_into(a, c, c));
    EXPECT_CHECK_FAILS(matmul(a, half, Transpose::b));
    EXPECT_CHECK_FAILS(matmul_into(c, zeros({2, 2}, DType::f64), zeros({2, 2}, DType::f64)));  // fp64 into fp32
}
