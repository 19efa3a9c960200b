#pragma once
// What the tests of the ops share. Each op's result is compared with a definition in double in its test, and its
// gradient with finite differences of that definition. Odd sizes on purpose.
#include "tests/support.h"

namespace train70b::test {

using Doubles = std::vector<double>;
constexpr double kForward = kAccuracies[0].forward;  // of fp32

inline Tensor empty(Shape shape, DType dtype = DType::f32) { return Tensor(std::move(shape), dtype, Device::cpu); }

inline Tensor zeros(Shape shape, DType dtype = DType::f32) {
    Tensor x = empty(std::move(shape), dtype);
    fill(x, 0);
    return x;
}

}  // namespace train70b::test
