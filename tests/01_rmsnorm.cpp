#include "tests/ops.h"

using namespace train70b;
using namespace train70b::test;

namespace {

Doubles rmsnorm_double(const Doubles& x, const Doubles& weight, double eps) {
    const size_t cols = weight.size();
    Doubles y(x.size());
    for (size_t row = 0; row < x.size(); row += cols) {
        double sum = 0;
        for (size_t c = 0; c < cols; ++c) sum += x[row + c] * x[row + c];
        for (size_t c = 0; c < cols; ++c) y[row + c] = x[row + c] / std::sqrt(sum / cols + eps) * weight[c];
    }
    return y;
}

}  // namespace

TEST_CASE("rmsnorm and its fused residual addition") {
    for (const auto& [dtype, forward, gradient] : kAccuracies) {
        const int64_t R = 6, E = 19;
        INFO("rmsnorm " << name_of(dtype) << ", R " << R << " E " << E);
        const double eps = 1e-5;
        const Doubles a = randoms(R * E, 1, dtype), b = randoms(R * E, 2, dtype), weight = randoms(E, 3, dtype),
                      dy = randoms(R * E, 4, dtype);
        const Tensor tw = tensor(weight, {E}, dtype), tdy = tensor(dy, {R, E}, dtype);
        Doubles x(a);
        for (size_t i = 0; i < x.size(); ++i)
            x[i] = dtype == DType::f64 ? a[i] + b[i] : double(float(a[i]) + float(b[i]));

        Tensor sum = empty({R, E}, dtype), y = empty({R, E}, dtype), inv_rms = empty({R}, dtype),
               plain = empty({R, E}, dtype), recomputed = empty({R, E}, dtype);
        add_rmsnorm(sum, y, inv_rms, tensor(a, {R, E}, dtype), tensor(b, {R, E}, dtype), tw, eps);
        EXPECT(values(sum) == x);
        EXPECT(distance(y, rmsnorm_double(x, weight, eps)) <= forward);
        rmsnorm(plain, inv_rms, sum, tw, eps);
        EXPECT(values(plain) == values(y));
        rmsnorm_recompute(recomputed, sum, inv_rms, tw);
        EXPECT(values(recomputed) == values(y));  // bitwise: selective recomputation must not change the loss

        Tensor dx = empty({R, E}, dtype), dweight = tensor(randoms(E, 5, dtype), {E}, dtype);
        const Doubles before = values(dweight);
        rmsnorm_backward(dx, dweight, tdy, sum, inv_rms, tw);
        EXPECT(distance(dx, differentiate([&](const Doubles& v) { return dot(rmsnorm_double(v, weight, eps), dy); },
                                          x)) <= gradient);
        Doubles expected = differentiate([&](const Doubles& v) { return dot(rmsnorm_double(x, v, eps), dy); }, weight);
        for (int64_t e = 0; e < E; ++e) expected[e] += before[e];
        EXPECT(distance(dweight, expected) <= gradient);
    }
}

TEST_CASE("rmsnorm: shapes and dtypes that do not fit are refused") {
    Tensor a = zeros({2, 3}), c = zeros({2, 2}), wide = zeros({2, 2}, DType::f64), weight = zeros({2}, DType::f64);
    Tensor inv_rms = zeros({2});
    EXPECT_CHECK_FAILS(rmsnorm(a, c, a, c, 1e-5));
    EXPECT_CHECK_FAILS(rmsnorm(wide, inv_rms, wide, weight, 1e-5));  // what is kept beside fp64 is fp64
}
