#include "tests/ops.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// q and k rotated, v as it is: (R, H*D), (R, K*D), (R, K*D) one behind another.
Doubles split_rope_double(const Doubles& qkv, const std::vector<int32_t>& positions, int64_t heads, int64_t kv_heads,
                          const Rope& rope) {
    const int64_t D = rope.head_dim, width = (heads + 2 * kv_heads) * D, rows = positions.size();
    Doubles q, k, v;
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t h = 0; h < heads + 2 * kv_heads; ++h) {
            const double* in = &qkv[r * width + h * D];
            Doubles& out = h < heads ? q : (h < heads + kv_heads ? k : v);
            for (int64_t d = 0; d < D; ++d) {
                const int64_t pair = d % (D / 2);
                const double angle = h < heads + kv_heads ? positions[r] * rope.inv_freq[pair] : 0;
                const double other = d < D / 2 ? -in[d + D / 2] : in[d - D / 2];
                out.push_back(in[d] * std::cos(angle) + other * std::sin(angle));
            }
        }
    q.insert(q.end(), k.begin(), k.end());
    q.insert(q.end(), v.begin(), v.end());
    return q;
}

}  // namespace

TEST_CASE("RoPE: rotate-half at given positions, grouped heads; the gradient is the inverse rotation") {
    for (const auto& [dtype, forward, gradient] : kAccuracies) {
        const int64_t H = 4, K = 2, D = 6, R = 5;
        INFO("split_rope " << name_of(dtype) << ", R " << R << " H " << H << " K " << K << " D " << D);
        Rope rope;
        rope.head_dim = D;
        for (int i = 0; i < D / 2; ++i) rope.inv_freq[i] = std::pow(10000.0, -2.0 * i / D);
        const std::vector<int32_t> positions = {0, 7, 3, 1000003, 2};  // scattered, and a million
        const Doubles qkv = randoms(R * (H + 2 * K) * D, 1, dtype);
        const Tensor where = upload(positions, {R}, Device::cpu);
        Tensor q = empty({R, H * D}, dtype), k = empty({R, K * D}, dtype), v = empty({R, K * D}, dtype);
        split_rope(q, k, v, tensor(qkv, {R, (H + 2 * K) * D}, dtype), where, rope);
        Doubles got = values(q);
        for (const Tensor& part : {k, v})
            for (double value : values(part)) got.push_back(value);
        EXPECT(distance(got, split_rope_double(qkv, positions, H, K, rope)) <= forward);

        const Doubles dy = randoms(qkv.size(), 2, dtype);
        const auto part = [&](int64_t begin, int64_t cols) {
            return tensor(Doubles(dy.begin() + begin, dy.begin() + begin + R * cols), {R, cols}, dtype);
        };
        Tensor dqkv = empty({R, (H + 2 * K) * D}, dtype);
        split_rope_backward(dqkv, part(0, H * D), part(R * H * D, K * D), part(R * (H + K) * D, K * D), where, rope);
        EXPECT(distance(
                   dqkv,
                   differentiate([&](const Doubles& x) { return dot(split_rope_double(x, positions, H, K, rope), dy); },
                                 qkv)) <= gradient);
    }
}

TEST_CASE("RoPE: positions that repeat, the last sequence cut short, and documents whose beginnings alone repeat") {
    Rope rope;
    rope.head_dim = 2;
    rope.inv_freq[0] = 1;
    for (const auto& positions : {std::vector<int32_t>{0, 7, 3, 0, 7}, {0, 7, 3, 0, 8}}) {
        const Doubles qkv = randoms(5 * 6, 1, DType::f64);
        Tensor q = empty({5, 2}, DType::f64), k = Tensor::like(q), v = Tensor::like(q);
        split_rope(q, k, v, tensor(qkv, {5, 6}, DType::f64), upload(positions, {5}, Device::cpu), rope);
        Doubles got = values(q);
        for (const Tensor& part : {k, v})
            for (double value : values(part)) got.push_back(value);
        EXPECT(distance(got, split_rope_double(qkv, positions, 1, 1, rope)) <= 1e-14);
    }
}
