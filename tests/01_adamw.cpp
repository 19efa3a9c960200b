#include "tests/ops.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("AdamW: five steps against the algorithm in double; decay, clipping factor, master weights") {
    const int64_t n = 37;
    const AdamWStep base{
        .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.1, .grad_scale = 0.3, .step = 0};
    for (DType dtype : {DType::f32, DType::bf16, DType::f64}) {
        INFO("adamw " << name_of(dtype) << ", " << n << " elements");
        const DType wide = stats_dtype(dtype);
        Tensor param = tensor(randoms(n, 1, wide), {n}, dtype), master, m = zeros({n}, wide), v = zeros({n}, wide);
        Doubles w = values(param), m64(n), v64(n);
        if (dtype == DType::bf16) master = tensor(w, {n});
        for (int step = 1; step <= 5; ++step) {
            const Doubles g = randoms(n, 10 + step, wide);
            AdamWStep now = base;
            now.step = step;
            adamw(param, master, m, v, tensor(g, {n}, wide), now);
            for (int64_t i = 0; i < n; ++i) {
                const double gradient = g[i] * now.grad_scale, b1 = now.beta1, b2 = now.beta2;
                m64[i] = b1 * m64[i] + (1 - b1) * gradient;
                v64[i] = b2 * v64[i] + (1 - b2) * gradient * gradient;
                const double update =
                    m64[i] / (1 - std::pow(b1, step)) / (std::sqrt(v64[i] / (1 - std::pow(b2, step))) + now.eps);
                w[i] -= now.lr * (update + now.weight_decay * w[i]);
            }
        }
        const double bound = kAccuracies[dtype == DType::f64].forward;
        EXPECT(distance(dtype == DType::bf16 ? master : param, w) <= bound);
        EXPECT(distance(m, m64) <= bound);
        EXPECT(distance(v, v64) <= bound);
        if (dtype == DType::bf16) {
            Tensor rounded = empty({n}, DType::bf16);
            copy(rounded, master);
            EXPECT(values(param) == values(rounded));
        }
    }
}

TEST_CASE("AdamW: moments of another dtype are refused") {
    Tensor param = zeros({2, 2}, DType::f64), none, first = zeros({2, 2}), second = zeros({2, 2});
    EXPECT_CHECK_FAILS(adamw(param, none, first, second, param, {.step = 1}));
}
