// Every op but attention: its result against a definition in double written here, its gradient against finite
// differences of that definition. Odd sizes on purpose.
#include "01_single_gpu/ops/cpu.h"
#include "tests/support.h"

using namespace train70b;
using namespace train70b::test;
using Doubles = std::vector<double>;

namespace {

constexpr double kForward = kAccuracies[0].forward;  // of fp32

Tensor empty(Shape shape, DType dtype = DType::f32) { return Tensor(std::move(shape), dtype, Device::cpu); }

Tensor zeros(Shape shape, DType dtype = DType::f32) {
    Tensor x = empty(std::move(shape), dtype);
    fill(x, 0);
    return x;
}

Doubles matmul_double(const Doubles& a, const Doubles& b, int64_t m, int64_t n, int64_t k, Transpose t) {
    Doubles c(m * n);
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j)
            for (int64_t l = 0; l < k; ++l)
                c[i * n + j] += (t == Transpose::a ? a[l * m + i] : a[i * k + l]) *
                                (t == Transpose::b ? b[j * k + l] : b[l * n + j]);
    return c;
}

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

Doubles swiglu_double(const Doubles& gate_up, int64_t cols) {
    Doubles h;
    for (size_t row = 0; row < gate_up.size(); row += 2 * cols)
        for (int64_t c = 0; c < cols; ++c) {
            const double gate = gate_up[row + c];
            h.push_back(gate / (1 + std::exp(-gate)) * gate_up[row + cols + c]);
        }
    return h;
}

double cross_entropy_double(const Doubles& logits, const std::vector<int32_t>& targets, int64_t cols, double scale) {
    double loss = 0;
    for (size_t r = 0; r < targets.size(); ++r) {
        double sum = 0;
        for (int64_t c = 0; c < cols; ++c) sum += std::exp(logits[r * cols + c]);
        loss += std::log(sum) - logits[r * cols + targets[r]];
    }
    return loss * scale;
}

}  // namespace

TEST_CASE("matmul: all three orientations, odd sizes, accumulation") {
    for (const auto& [dtype, forward, gradient] : kAccuracies) {
        INFO(std::string(name_of(dtype)));
        for (Transpose t : {Transpose::none, Transpose::a, Transpose::b})
            for (auto [m, n, k] : {std::array<int64_t, 3>{5, 7, 3}, {1, 9, 17}, {65, 33, 129}}) {
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
        INFO(std::string(name_of(dtype)));
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

TEST_CASE("fill, scale, add, copy and sum of squares") {
    for (const auto& [dtype, forward, gradient] : kAccuracies) {
        INFO(std::string(name_of(dtype)));
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

TEST_CASE("embedding: rows of this rank's part, zeros outside; gradient sums repeated tokens") {
    for (const auto& [dtype, forward, gradient] : kAccuracies) {
        INFO(std::string(name_of(dtype)));
        const int64_t V = 5, E = 7;
        const std::vector<int32_t> ids = {3, 0, 3, 4, 9};
        const Doubles table = randoms(V * E, 1, dtype), dy = randoms(5 * E, 2, dtype);
        const Tensor tokens = upload(ids, {5}, Device::cpu);
        for (int64_t first : {0, 2}) {
            const auto lookup = [&](const Doubles& t) {
                Doubles y(5 * E);
                for (size_t r = 0; r < ids.size(); ++r)
                    if (ids[r] >= first && ids[r] - first < V)
                        for (int64_t e = 0; e < E; ++e) y[r * E + e] = t[(ids[r] - first) * E + e];
                return y;
            };
            Tensor y = empty({5, E}, dtype), dtable = zeros({V, E}, dtype);
            embedding(y, tokens, tensor(table, {V, E}, dtype), first);
            EXPECT(values(y) == lookup(table));
            embedding_backward(dtable, tokens, tensor(dy, {5, E}, dtype), first);
            embedding_backward(dtable, tokens, tensor(dy, {5, E}, dtype), first);  // gradients add up
            Doubles expected = differentiate([&](const Doubles& t) { return 2 * dot(lookup(t), dy); }, table);
            EXPECT(distance(dtable, expected) <= gradient);
        }
    }
}

TEST_CASE("rmsnorm and its fused residual addition") {
    for (const auto& [dtype, forward, gradient] : kAccuracies) {
        INFO(std::string(name_of(dtype)));
        const int64_t R = 6, E = 19;
        const double eps = 1e-5;
        const Doubles a = randoms(R * E, 1, dtype), b = randoms(R * E, 2, dtype), weight = randoms(E, 3, dtype),
                      dy = randoms(R * E, 4, dtype);
        const Tensor tw = tensor(weight, {E}, dtype), tdy = tensor(dy, {R, E}, dtype);
        Doubles x(a);
        for (size_t i = 0; i < x.size(); ++i)
            x[i] = dtype == DType::f64 ? a[i] + b[i] : double(float(a[i]) + float(b[i]));

        Tensor sum = empty({R, E}, dtype), y = empty({R, E}, dtype), inv_rms = empty({R}, dtype),
               plain = empty({R, E}, dtype), again = empty({R, E}, dtype);
        add_rmsnorm(sum, y, inv_rms, tensor(a, {R, E}, dtype), tensor(b, {R, E}, dtype), tw, eps);
        EXPECT(values(sum) == x);
        EXPECT(distance(y, rmsnorm_double(x, weight, eps)) <= forward);
        rmsnorm(plain, inv_rms, sum, tw, eps);
        EXPECT(values(plain) == values(y));
        rmsnorm_again(again, sum, inv_rms, tw);
        EXPECT(values(again) == values(y));  // bitwise: selective recomputation must not change the loss

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

TEST_CASE("RoPE: rotate-half at given positions, grouped heads; the gradient is the inverse rotation") {
    for (const auto& [dtype, forward, gradient] : kAccuracies) {
        INFO(std::string(name_of(dtype)));
        const int64_t H = 4, K = 2, D = 6, R = 5;
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

TEST_CASE("SwiGLU") {
    for (const auto& [dtype, forward, gradient] : kAccuracies) {
        INFO(std::string(name_of(dtype)));
        const int64_t R = 3, F = 21;
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
}

TEST_CASE("attention over two sets of keys, merged, is attention over both; a set without keys adds nothing") {
    const int64_t R = 6, H = 3, D = 5;
    for (DType dtype : {DType::f32, DType::bf16, DType::f64}) {
        const DType wide = stats_dtype(dtype);
        const double bound = kAccuracies[dtype == DType::f64].forward;
        const Doubles o1 = randoms(R * H * D, 1, wide), l1 = randoms(R * H, 2, wide), l2 = randoms(R * H, 4, wide);
        const Tensor part = tensor(randoms(R * H * D, 3, wide), {R, H * D}, dtype);
        const Doubles o2 = values(part);
        Doubles a(l1), b(l2), out, lse;
        for (int64_t i = 0; i < R * H; ++i) {
            a[i] *= 40, b[i] *= 40;  // far apart, in both directions
            if (i % 5 == 1) a[i] = -INFINITY;
            if (i % 5 == 2) b[i] = -INFINITY;
            if (i == 10) a[i] = b[i] = -INFINITY;
            if (wide == DType::f32) a[i] = double(float(a[i])), b[i] = double(float(b[i]));
            const double most = std::max(a[i], b[i]);
            const double l = i == 10 ? -INFINITY : most + std::log(std::exp(a[i] - most) + std::exp(b[i] - most));
            lse.push_back(l);
            for (int64_t d = 0; d < D; ++d)
                out.push_back(i == 10 ? o1[i * D + d]
                                      : o1[i * D + d] * std::exp(a[i] - l) + o2[i * D + d] * std::exp(b[i] - l));
        }
        Tensor x = tensor(o1, {R, H * D}, wide), x_lse = tensor(a, {R, H}, wide);
        merge_attention(x, x_lse, part, tensor(b, {R, H}, wide));
        EXPECT(distance(x, out) <= bound);
        const Doubles got = values(x_lse);
        for (int64_t i = 0; i < R * H; ++i)
            EXPECT((got[i] == lse[i] || std::abs(got[i] - lse[i]) <= bound * (std::abs(lse[i]) + 1)));
    }
    Tensor x = zeros({1, 1}), lse = tensor({NAN}, {1, 1});
    merge_attention(x, lse, zeros({1, 1}), zeros({1, 1}));
    EXPECT(std::isnan(read(lse)[0]));
}

TEST_CASE("blocks exchanged: (a, b, w) to (b, a, w), of any dtype, there and back") {
    for (DType dtype : {DType::f32, DType::bf16})
        for (auto [a, b, w] : {std::array<int64_t, 3>{2, 3, 4}, {5, 1, 3}, {1, 7, 2}, {4, 8, 16}}) {
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

TEST_CASE("cross-entropy, whole and with the vocabulary in two parts") {
    for (const auto& [dtype, forward, gradient] : kAccuracies) {
        INFO(std::string(name_of(dtype)));
        const int64_t R = 5, V = 11, cut = 4;
        const double factor = 1.0 / 7;
        Doubles logits = randoms(R * V, 1, dtype);
        for (double& v : logits) v *= 20;
        const std::vector<int32_t> ids = {0, 10, 3, 4, 7};
        const Tensor targets = upload(ids, {R}, Device::cpu);
        Tensor x = tensor(logits, {R, V}, dtype), max = empty({R}, dtype), sum = empty({R}, dtype),
               at = empty({R}, dtype), lse = empty({R}, dtype), loss = empty({1}, dtype);
        softmax_stats(max, sum, at, x, targets);
        cross_entropy(loss, lse, max, sum, at, factor);
        EXPECT(std::abs(read(loss)[0] / cross_entropy_double(logits, ids, V, factor) - 1) <= forward);
        cross_entropy_backward(x, targets, lse, factor);
        EXPECT(distance(x, differentiate([&](const Doubles& v) { return cross_entropy_double(v, ids, V, factor); },
                                         logits)) <= gradient);

        for (auto [begin, end] : {std::array<int64_t, 2>{0, cut}, {cut, V}}) {
            Doubles part;
            for (int64_t r = 0; r < R; ++r)
                part.insert(part.end(), &logits[r * V + begin], &logits[r * V + begin] + (end - begin));
            Tensor y = tensor(part, {R, end - begin}, dtype);
            softmax_stats(max, sum, at, y, targets, begin);
            for (int64_t r = 0; r < R; ++r)
                EXPECT(values(at)[r] ==
                       (ids[r] >= begin && ids[r] < end ? values(y)[r * (end - begin) + ids[r] - begin] : 0));
            cross_entropy_backward(y, targets, lse, factor, begin);
            const Doubles got = values(y), whole = values(x);
            for (int64_t r = 0; r < R; ++r)
                for (int64_t c = begin; c < end; ++c) EXPECT(got[r * (end - begin) + c - begin] == whole[r * V + c]);
        }
    }
}

TEST_CASE("cross-entropy: padding never wins, gets no gradient, and a part that is nothing but padding adds nothing") {
    const int64_t R = 4, V = 7, wide = 12;
    const double factor = 0.25;
    const std::vector<int32_t> ids = {0, 6, 3, 2};
    const Tensor targets = upload(ids, {R}, Device::cpu);
    for (const double level : {-60.0, 0.0, 60.0}) {  // far below the padding's 0, and far above
        Doubles real, padded;
        for (int64_t r = 0; r < R; ++r) {
            const Doubles row = randoms(V, 10 + r);
            for (int64_t v = 0; v < wide; ++v) padded.push_back(v < V ? level + 5 * row[v] : 0);
            real.insert(real.end(), &padded[r * wide], &padded[r * wide] + V);
        }
        const double expected = cross_entropy_double(real, ids, V, factor);
        const Doubles gradient =
            differentiate([&](const Doubles& x) { return cross_entropy_double(x, ids, V, factor); }, real);
        for (DType dtype : {DType::f32, DType::bf16}) {
            Tensor x = tensor(padded, {R, wide}, dtype), max = empty({R}), sum = empty({R}), at = empty({R});
            Tensor lse = empty({R}), loss = empty({1});
            softmax_stats(max, sum, at, x, targets, 0, V);
            cross_entropy(loss, lse, max, sum, at, factor);
            cross_entropy_backward(x, targets, lse, factor, 0, V);
            const Doubles got = values(x);
            if (dtype == DType::f32) {
                EXPECT(std::abs(read(loss)[0] / expected - 1) <= kForward);
                Doubles inside;
                for (int64_t r = 0; r < R; ++r) inside.insert(inside.end(), &got[r * wide], &got[r * wide] + V);
                EXPECT(distance(inside, gradient) <= 5e-5);  // of logits around 60
            }
            for (int64_t i = 0; i < R * wide; ++i)
                if (i % wide >= V) EXPECT(got[i] == 0);
        }
        // Three ranks: columns 0..3, 4..7 of which one is padding, 8..11 of which all are.
        Tensor whole_max = tensor(Doubles(R, -INFINITY), {R}), whole_sum = zeros({R}), whole_at = zeros({R});
        std::vector<Tensor> maxima, sums;
        for (int64_t first : {0, 4, 8}) {
            Doubles part;
            for (int64_t r = 0; r < R; ++r)
                part.insert(part.end(), &padded[r * wide + first], &padded[r * wide + first] + 4);
            Tensor at = empty({R});
            maxima.push_back(empty({R}));
            sums.push_back(empty({R}));
            softmax_stats(maxima.back(), sums.back(), at, tensor(part, {R, 4}), targets, first, V);
            add(whole_at, whole_at, at);
            for (int64_t r = 0; r < R; ++r)
                whole_max.data<float>()[r] = std::max(whole_max.data<float>()[r], maxima.back().data<float>()[r]);
        }
        for (size_t i = 0; i < 3; ++i) {
            rescale_sums(sums[i], maxima[i], whole_max);
            add(whole_sum, whole_sum, sums[i]);
        }
        for (double x : read(sums[2])) EXPECT(x == 0);
        Tensor lse = empty({R}), loss = empty({1});
        cross_entropy(loss, lse, whole_max, whole_sum, whole_at, factor);
        EXPECT(std::abs(read(loss)[0] / expected - 1) <= kForward);
    }
}

TEST_CASE("sums of two parts of the vocabulary on the scale of the whole row's maximum") {
    const int64_t R = 5, V = 11, cut = 4;
    const Tensor targets = upload({0, 10, 3, 4, 7}, {R}, Device::cpu);
    for (const auto& [dtype, forward, gradient] : kAccuracies) {
        INFO(std::string(name_of(dtype)));
        const Doubles logits = values(tensor(randoms(R * V, 1, dtype), {R, V}, dtype));
        Tensor max[2], sum[2], whole_max = empty({R}, dtype), at = empty({R}, dtype);
        for (int i = 0; i < 2; ++i) {
            const int64_t begin = i ? cut : 0, end = i ? V : cut;
            Doubles part;
            for (int64_t r = 0; r < R; ++r)
                part.insert(part.end(), &logits[r * V + begin], &logits[r * V + begin] + (end - begin));
            max[i] = empty({R}, dtype), sum[i] = empty({R}, dtype);
            softmax_stats(max[i], sum[i], at, tensor(part, {R, end - begin}, dtype), targets, begin);
        }
        Doubles most, expected;
        for (int64_t r = 0; r < R; ++r) {
            most.push_back(*std::max_element(&logits[r * V], &logits[r * V] + V));
            double total = 0;
            for (int64_t v = 0; v < V; ++v) total += std::exp(logits[r * V + v] - most.back());
            expected.push_back(total);
        }
        copy(whole_max, tensor(most, {R}, dtype));
        for (int i = 0; i < 2; ++i) rescale_sums(sum[i], max[i], whole_max);
        add(sum[0], sum[0], sum[1]);
        EXPECT(distance(sum[0], expected) <= forward);
    }
}

TEST_CASE("NaN and infinity in the logits reach the loss") {
    for (double poison : {double(NAN), double(INFINITY)}) {
        Tensor x = tensor({0, poison, 0, 0, 0, 0}, {2, 3}), max = empty({2}), sum = empty({2}), at = empty({2});
        Tensor lse = empty({2}), loss = empty({1});
        softmax_stats(max, sum, at, x, upload({0, 1}, {2}, Device::cpu));
        cross_entropy(loss, lse, max, sum, at, 1);
        EXPECT(!std::isfinite(read(loss)[0]));
    }
}

TEST_CASE("AdamW: five steps against the algorithm in double; decay, clipping factor, master weights") {
    const int64_t n = 37;
    const AdamWStep base{
        .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-3, .weight_decay = 0.1, .grad_scale = 0.3, .step = 0};
    for (DType dtype : {DType::f32, DType::bf16, DType::f64}) {
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

TEST_CASE("shapes, dtypes and devices that do not fit are refused") {
    Tensor a = zeros({2, 3}), b = zeros({4, 2}), c = zeros({2, 2}), half = zeros({2, 3}, DType::bf16);
    Tensor far({2, 3}, DType::f32, Device::meta);
    EXPECT_CHECK_FAILS(matmul(a, b));
    EXPECT_CHECK_FAILS(matmul_into(a, c, c));
    EXPECT_CHECK_FAILS(matmul(a, half, Transpose::b));
    EXPECT_CHECK_FAILS(add(a, a, c));
    EXPECT_CHECK_FAILS(add(a, a, far));
    EXPECT_CHECK_FAILS(swiglu(a, a));
    EXPECT_CHECK_FAILS(rmsnorm(a, c, a, c, 1e-5));
    // fp64 takes no detour over fp32, neither of results nor of what is kept beside them.
    Tensor wide = zeros({2, 2}, DType::f64), inv = zeros({2}), weight = zeros({2}, DType::f64), one = zeros({1});
    EXPECT_CHECK_FAILS(matmul_into(c, wide, wide));
    EXPECT_CHECK_FAILS(rmsnorm(wide, inv, wide, weight, 1e-5));
    EXPECT_CHECK_FAILS(sum_squares(one, wide));
    EXPECT_CHECK_FAILS(softmax_stats(inv, inv, inv, wide, upload({0, 1}, {2}, Device::cpu)));
    Tensor none, first = zeros({2, 2}), second = zeros({2, 2});
    EXPECT_CHECK_FAILS(adamw(wide, none, first, second, wide, {.step = 1}));
}
