#include "tests/ops.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr int64_t kHeads = 4, kKvHeads = 2, D = 6, R = 5, kAll = kHeads + 2 * kKvHeads;
constexpr double kEps = 1e-2;  // large enough to matter

Doubles head_norm_double(const Doubles& qkv, const Doubles& q_weight, const Doubles& k_weight) {
    Doubles y(qkv);
    for (int64_t head = 0; head < R * kAll; ++head) {
        const int64_t h = head % kAll;
        if (h >= kHeads + kKvHeads) continue;
        double squares = 0;
        for (int64_t d = 0; d < D; ++d) squares += qkv[head * D + d] * qkv[head * D + d];
        for (int64_t d = 0; d < D; ++d)
            y[head * D + d] *= (h < kHeads ? q_weight : k_weight)[d] / std::sqrt(squares / D + kEps);
    }
    return y;
}

}  // namespace

TEST_CASE("the norm of each head of q and k, and its gradients") {
    for (const auto& [dtype, forward, gradient] : kAccuracies)
        for (const DType grad_dtype : {dtype, stats_dtype(dtype)}) {
            INFO("head_norm " << name_of(dtype) << ", gradients of the weights " << name_of(grad_dtype));
            const Doubles qkv = randoms(R * kAll * D, 1, dtype), wq = randoms(D, 2, dtype), wk = randoms(D, 3, dtype),
                          dy = randoms(R * kAll * D, 4, dtype);
            const Tensor x = tensor(qkv, {R, kAll * D}, dtype), tq = tensor(wq, {D}, dtype),
                         tk = tensor(wk, {D}, dtype);
            Tensor y = empty({R, kAll * D}, dtype);
            head_norm(y, x, tq, tk, kKvHeads * D, kEps);
            EXPECT(distance(y, head_norm_double(qkv, wq, wk)) <= forward);

            Tensor grad = tensor(dy, {R, kAll * D}, dtype), dwq = tensor(randoms(D, 5, grad_dtype), {D}, grad_dtype),
                   dwk = tensor(randoms(D, 6, grad_dtype), {D}, grad_dtype);
            const Doubles q_before = values(dwq), k_before = values(dwk);
            head_norm_backward(grad, dwq, dwk, x, tq, tk, kKvHeads * D, kEps);
            const auto slope = [&](const Doubles& at, const std::function<Doubles(const Doubles&)>& f) {
                return differentiate([&](const Doubles& v) { return dot(f(v), dy); }, at);
            };
            EXPECT(distance(grad, slope(qkv, [&](const Doubles& v) { return head_norm_double(v, wq, wk); })) <=
                   gradient);
            Doubles expected_q = slope(wq, [&](const Doubles&v) { return head_norm_double(qkv, v, wk); }),
                    expected_k = slope(wk, [&](const Doubles&v) { return head_norm_double(qkv, wq, v); });
            for (int64_t d = 0; d < D; ++d) expected_q[d] += q_before[d], expected_k[d] += k_before[d];
            EXPECT(distance(dwq, expected_q) <= gradient);
            EXPECT(distance(dwk, expected_k) <= gradient);
        }
}

TEST_CASE("head_norm: shapes and dtypes that do not fit are refused") {
    Tensor qkv = zeros({2, 8}), y = zeros({2, 8}), other = zeros({2, 6}), weight = zeros({2}), wide = zeros({3});
    Tensor f64 = zeros({2}, DType::f64);
    EXPECT_CHECK_FAILS(head_norm(other, qkv, weight, weight, 2, kEps));
    EXPECT_CHECK_FAILS(head_norm(y, qkv, wide, wide, 3, kEps));      // heads of 3 in rows of 8
    EXPECT_CHECK_FAILS(head_norm(y, qkv, weight, weight, 4, kEps));  // no q is left
    EXPECT_CHECK_FAILS(head_norm(y, qkv, weight, f64, 2, kEps));
    EXPECT_CHECK_FAILS(head_norm_backward(y, wide, weight, qkv, weight, weight, 2, kEps));
}
