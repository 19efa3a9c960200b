#include "tests/ops.h"

using namespace train70b;
using namespace train70b::test;

namespace {

Doubles swiglu_double(const Doubles& gate_up, int64_t cols) {
    Doubles h;
    for (size_t row = 0; row < gate_up.size(); row += 2 * cols)
        for (int64_t c = 0; c < cols; ++c) {
            const double gate = gate_up[row + c];
            h.push_back(gate / (1 + std::exp(-gate)) * gate_up[row + cols + c]);
        }
    return h;
}

}  // namespace

TEST_CASE("SwiGLU") {
    for (const auto& [dtype, forward, gradient] : kAccuracies) {
        const int64_t R = 3, F = 21;
        INFO("swiglu " << name_of(dtype) << ", R " << R << " F " << F);
        Doubles gate_up = randoms(R * 2 * F, 1, dtype);
        for (size_t i = 0; i < gate_up.size(); ++i) gate_up[i] *= 8;
        const Doubles dh = randoms(R * F, 2, dtype);
        Tensor h = empty({R, F}, dtype), dgate_up = empty({R, 2 * F}, dtype);
        swiglu(h, tensor(gate_up, {R, 2 * F}, dtype));
        EXPECT(distance(h, swiglu_double(gate_up, F)) <= forward);
        swiglu_backward(dgate_up, tensor(dh, {R, F}, dtype), tensor(gate_up, {R, 2 * F}, dtype));
        EXPECT(distance(dgate_up, differentiate([&](const Doubles& v) { return dot(swiglu_double(v, F), dh); },
                                                gate_up)) <= gradient);
    }
}

TEST_CASE("SwiGLU does not overflow far out") {
    Tensor h = empty({1, 4});
    swiglu(h, tensor({-1e4, 1e4, -100, 90, 1, 1, 1, 1}, {1, 8}));
    const Doubles got = values(h);
    EXPECT(std::abs(got[0]) <= 1e-30);
    EXPECT(got[1] == 1e4);
    EXPECT(std::abs(got[2]) <= 1e-30);
    EXPECT(got[3] == 90);
}

TEST_CASE("SwiGLU: shapes that do not fit are refused") {
    Tensor h = zeros({2, 3});
    EXPECT_CHECK_FAILS(swiglu(h, h));
}
