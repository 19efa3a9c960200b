#include "tests/ops.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("the bias of a linear layer, and its gradient") {
    for (const auto& [dtype, forward, gradient] : kAccuracies)
        for (const DType grad : {dtype, stats_dtype(dtype)}) {
            const int64_t R = 9, N = 21;
            INFO("add_bias " << name_of(dtype) << ", gradient " << name_of(grad) << ", R " << R << " N " << N);
            const Doubles y = randoms(R * N, 1, dtype), bias = randoms(N, 2, dtype), dy = randoms(R * N, 3, dtype);
            const auto biased = [&](const Doubles& b) {
                Doubles out(y);
                for (int64_t i = 0; i < R * N; ++i) out[i] += b[i % N];
                return out;
            };
            Tensor ty = tensor(y, {R, N}, dtype);
            add_bias(ty, tensor(bias, {N}, dtype));
            EXPECT(distance(ty, biased(bias)) <= forward);

            Tensor dbias = tensor(randoms(N, 4, grad), {N}, grad);
            Doubles expected = values(dbias);
            const Doubles slope = differentiate([&](const Doubles& b) { return dot(biased(b), dy); }, bias);
            for (int64_t c = 0; c < N; ++c) expected[c] += slope[c];
            add_bias_backward(dbias, tensor(dy, {R, N}, dtype));
            EXPECT(distance(dbias, expected) <= gradient);
        }
}

TEST_CASE("add_bias: shapes and dtypes that do not fit are refused") {
    Tensor y = zeros({2, 3}), narrow = zeros({2}), wide = zeros({3}, DType::f64), ids = zeros({3}, DType::i32);
    EXPECT_CHECK_FAILS(add_bias(y, narrow));
    EXPECT_CHECK_FAILS(add_bias(y, wide));
    EXPECT_CHECK_FAILS(add_bias_backward(narrow, y));
    EXPECT_CHECK_FAILS(add_bias_backward(ids, y));
}
