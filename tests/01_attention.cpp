// Attention against a definition in double with the whole score matrix, and its gradient against finite differences.
#include "tests/support.h"

using namespace train70b;
using namespace train70b::test;
using Doubles = std::vector<double>;

namespace {

// Rows: (B*Tq, H*D) of out, then (B*Tq, H) of lse.
Doubles attention_double(const Doubles& q, const Doubles& k, const Doubles& v, const AttentionShape& s) {
    const int64_t D = s.head_dim;
    Doubles out(s.batch * s.query_len * s.heads * D), lse(s.batch * s.query_len * s.heads);
    for (int64_t b = 0; b < s.batch; ++b)
        for (int64_t h = 0; h < s.heads; ++h)
            for (int64_t i = 0; i < s.query_len; ++i) {
                const int64_t row = b * s.query_len + i, kv = h / (s.heads / s.kv_heads);
                const int64_t seen =
                    s.causal ? std::clamp<int64_t>(i + 1 + s.key_len - s.query_len, 0, s.key_len) : s.key_len;
                Doubles p(seen);
                double sum = 0;
                for (int64_t j = 0; j < seen; ++j) {
                    for (int64_t d = 0; d < D; ++d)
                        p[j] += q[(row * s.heads + h) * D + d] * k[((b * s.key_len + j) * s.kv_heads + kv) * D + d];
                    sum += p[j] = std::exp(p[j] / std::sqrt(double(D)));
                }
                lse[row * s.heads + h] = std::log(sum);
                for (int64_t j = 0; j < seen; ++j)
                    for (int64_t d = 0; d < D; ++d)
                        out[(row * s.heads + h) * D + d] +=
                            p[j] / sum * v[((b * s.key_len + j) * s.kv_heads + kv) * D + d];
            }
    out.insert(out.end(), lse.begin(), lse.end());
    return out;
}

struct Case {
    AttentionShape shape;
    Doubles q, k, v, dout;
    Tensor tq, tk, tv, tdout, out, lse;

    explicit Case(const AttentionShape& s, DType dtype = DType::f32, double size = 2) : shape(s) {
        const int64_t rows = s.batch * s.query_len, keys = s.batch * s.key_len, E = s.heads * s.head_dim,
                      K = s.kv_heads * s.head_dim;
        const auto make = [&](int64_t r, int64_t c, uint64_t key, Doubles& doubles) {
            doubles = randoms(r * c, key);
            for (double& x : doubles) x *= size;
            Tensor t = tensor(doubles, {r, c}, dtype);
            doubles = values(t);
            return t;
        };
        tq = make(rows, E, 1, q);
        tk = make(keys, K, 2, k);
        tv = make(keys, K, 3, v);
        tdout = make(rows, E, 4, dout);
        out = Tensor::like(tq);
        lse = Tensor({rows, s.heads}, DType::f32, Device::cpu);
        attention(out, lse, tq, tk, tv, s);
    }
    Doubles both() const {
        Doubles got = values(out);
        for (double x : values(lse)) got.push_back(x);
        return got;
    }
};

}  // namespace

TEST_CASE("attention: grouped queries, tiles and their remainders, separate lengths, both masks") {
    for (const AttentionShape& s : {AttentionShape{2, 5, 5, 4, 2, 6, true},
                                    {1, 64, 64, 2, 1, 16, true},
                                    {1, 131, 131, 3, 3, 8, true},
                                    {2, 70, 130, 4, 1, 10, true},
                                    {1, 130, 70, 2, 2, 4, false},
                                    {1, 1, 200, 2, 1, 12, false},
                                    {1, 65, 129, 1, 1, 32, true}}) {
        Case c(s);
        INFO("Tq " << s.query_len << " Tk " << s.key_len << " causal " << s.causal);
        EXPECT(distance(c.both(), attention_double(c.q, c.k, c.v, s)) <= 2e-6);
    }
}

TEST_CASE("attention: large scores stay finite") {
    Case c({1, 80, 80, 2, 1, 8, true}, DType::f32,
           60);  // scores of thousands: exp would overflow without the running maximum
    for (double x : c.both()) REQUIRE(std::isfinite(x));
}

TEST_CASE("attention: a query that sees no key gives 0 and -inf, and passes nothing back") {
    Case c({1, 5, 2, 1, 1, 4, true});  // queries 0..2 lie before the first key
    const Doubles out = values(c.out), lse = values(c.lse);
    for (int i = 0; i < 5; ++i) EXPECT(std::isinf(lse[i]) == (i < 3));
    for (int i = 0; i < 12; ++i) EXPECT(out[i] == 0);
    Tensor dq = Tensor::like(c.tq), dk = Tensor::like(c.tk), dv = Tensor::like(c.tv);
    attention_backward(dq, dk, dv, c.tdout, c.tq, c.tk, c.tv, c.out, c.lse, c.shape);
    const Doubles got = values(dq);
    for (int i = 0; i < 12; ++i) EXPECT(got[i] == 0);
    for (double x : values(dk)) EXPECT(std::isfinite(x));
}

TEST_CASE("attention: gradients of q, k and v") {
    for (const AttentionShape& s : {AttentionShape{2, 7, 7, 4, 2, 4, true},
                                    {1, 3, 9, 2, 1, 6, true},
                                    {1, 9, 4, 2, 2, 4, false},
                                    {1, 66, 66, 1, 1, 2, true}}) {
        Case c(s);
        INFO("Tq " << s.query_len << " Tk " << s.key_len << " causal " << s.causal);
        Tensor dq = Tensor::like(c.tq), dk = Tensor::like(c.tk), dv = Tensor::like(c.tv);
        attention_backward(dq, dk, dv, c.tdout, c.tq, c.tk, c.tv, c.out, c.lse, s);
        const auto f = [&](const Doubles& q, const Doubles& k, const Doubles& v) {
            Doubles y = attention_double(q, k, v, s);
            y.resize(c.dout.size());
            return dot(y, c.dout);
        };
        EXPECT(distance(dq, differentiate([&](const Doubles& x) { return f(x, c.k, c.v); }, c.q)) <= 5e-6);
        EXPECT(distance(dk, differentiate([&](const Doubles& x) { return f(c.q, x, c.v); }, c.k)) <= 5e-6);
        EXPECT(distance(dv, differentiate([&](const Doubles& x) { return f(c.q, c.k, x); }, c.v)) <= 5e-6);
    }
}

// What chapter 06 stands on: keys in two parts, each attended to alone, merged by their log-sum-exp; and the backward
// pass of each part with the merged out and lse gives that part's share of the gradients.
TEST_CASE("attention: two parts merged equal the whole, forward and backward, with fp32 gradients") {
    const int64_t T = 40, half = 20, H = 4, K = 2, D = 6;
    Case whole({1, T, T, H, K, D, true});
    const AttentionShape full{1, half, half, H, K, D, false}, diagonal{1, half, half, H, K, D, true};
    // The second half of the queries sees the first half of the keys (no mask) and its own (causal).
    const Tensor q = whole.tq.row_slice(half, T), dout = whole.tdout.row_slice(half, T);
    Tensor out = Tensor::like(q), lse({half, H}, DType::f32, Device::cpu);
    std::array<Tensor, 2> outs, lses;
    for (int part = 0; part < 2; ++part) {
        outs[part] = Tensor::like(q);
        lses[part] = Tensor::like(lse);
        attention(outs[part], lses[part], q, whole.tk.row_slice(part * half, (part + 1) * half),
                  whole.tv.row_slice(part * half, (part + 1) * half), part == 0 ? full : diagonal);
    }
    for (int64_t i = 0; i < half * H; ++i) {
        const double a = lses[0].data<float>()[i], b = lses[1].data<float>()[i],
                     sum = std::log(std::exp(a) + std::exp(b));
        lse.data<float>()[i] = float(sum);
        for (int64_t d = 0; d < D; ++d)
            out.data<float>()[i * D + d] = float(std::exp(a - sum) * outs[0].data<float>()[i * D + d] +
                                                 std::exp(b - sum) * outs[1].data<float>()[i * D + d]);
    }
    EXPECT(distance(out, values(whole.out.row_slice(half, T))) <= 2e-6);
    EXPECT(distance(lse, values(whole.lse.row_slice(half, T))) <= 2e-6);

    Tensor dq = Tensor::like(whole.tq), dk = Tensor::like(whole.tk), dv = Tensor::like(whole.tv);
    attention_backward(dq, dk, dv, whole.tdout, whole.tq, whole.tk, whole.tv, whole.out, whole.lse, whole.shape);
    Tensor sum_dq = Tensor::like(q);
    fill(sum_dq, 0);
    for (int part = 0; part < 2; ++part) {
        const Tensor k = whole.tk.row_slice(part * half, (part + 1) * half),
                     v = whole.tv.row_slice(part * half, (part + 1) * half);
        Tensor dq_part = Tensor::like(q), dk_part = Tensor::like(k), dv_part = Tensor::like(v);
        attention_backward(dq_part, dk_part, dv_part, dout, q, k, v, out, lse, part == 0 ? full : diagonal);
        add(sum_dq, sum_dq, dq_part);
        if (part == 1) {  // the second half's keys are seen by the second half's queries alone
            EXPECT(distance(dk_part, values(dk.row_slice(half, T))) <= 5e-6);
            EXPECT(distance(dv_part, values(dv.row_slice(half, T))) <= 5e-6);
        }
    }
    EXPECT(distance(sum_dq, values(dq.row_slice(half, T))) <= 5e-6);
}

TEST_CASE("attention: bf16 inputs, gradients in bf16 or fp32") {
    const AttentionShape s{2, 33, 33, 4, 2, 8, true};
    Case c(s, DType::bf16);
    Doubles expected = attention_double(c.q, c.k, c.v, s);
    EXPECT(distance(c.both(), expected) <= 4e-3);
    const auto run = [&](DType dtype) {
        Tensor dq(c.tq.shape(), dtype, Device::cpu), dk(c.tk.shape(), dtype, Device::cpu),
            dv(c.tv.shape(), dtype, Device::cpu);
        attention_backward(dq, dk, dv, c.tdout, c.tq, c.tk, c.tv, c.out, c.lse, s);
        Doubles all = values(dq);
        for (const Tensor& part : {dk, dv})
            for (double x : values(part)) all.push_back(x);
        return all;
    };
    const Doubles narrow = run(DType::bf16), wide = run(DType::f32);
    EXPECT(distance(narrow, wide) <= 4e-3);
    EXPECT(distance(narrow, wide) > 1e-4);
}

TEST_CASE("attention: memory does not grow with the square of the sequence") {
    const auto workspace = [](int64_t T) {
        const AttentionShape s{1, T, T, 1, 1, 16, true};
        Case c(s);
        Tensor dq = Tensor::like(c.tq), dk = Tensor::like(c.tk), dv = Tensor::like(c.tv);
        ledger().reset_peak();
        const int64_t before = ledger().total();
        attention_backward(dq, dk, dv, c.tdout, c.tq, c.tk, c.tv, c.out, c.lse, s);
        return ledger().peak().total - before;
    };
    EXPECT(workspace(1024) == 4 * workspace(256));
}
