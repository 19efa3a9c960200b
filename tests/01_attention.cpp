// Attention against its definition with the whole score matrix, in double, and its gradient against finite differences.
#include <omp.h>

#include "tests/attention.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("attention: grouped queries, tiles and their remainders, separate lengths, both masks") {
    for (const AttentionShape& s : {AttentionShape{2, 5, 5, 4, 2, 6, true},
                                    {1, 64, 64, 2, 1, 16, true},
                                    {1, 131, 131, 3, 3, 8, true},
                                    {2, 70, 130, 4, 1, 10, true},
                                    {1, 130, 70, 2, 2, 4, false},
                                    {1, 1, 200, 2, 1, 12, false},
                                    {1, 65, 129, 1, 1, 32, true}}) {
        for (const auto& [dtype, forward, gradient] : kAccuracies) {
            INFO("attention " << name_of(dtype) << ", Tq " << s.query_len << " Tk " << s.key_len << " D " << s.head_dim
                              << " causal " << s.causal);
            Case c(s, dtype);
            const Doubles expected = attention_double(c.q, c.k, c.v, s);
            const int64_t out = c.out.size();  // out and lse, each against its own size
            const Doubles got = c.both();
            EXPECT(distance({got.begin(), got.begin() + out}, {expected.begin(), expected.begin() + out}) <= forward);
            EXPECT(distance({got.begin() + out, got.end()}, {expected.begin() + out, expected.end()}) <= forward);
        }
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

TEST_CASE("attention: one NaN among a query's scores is not hidden, and reaches no query that does not see its key") {
    Case c({1, 40, 40, 1, 1, 8, true});
    c.tk.data<float>()[20 * 8] = NAN;
    attention(c.out, c.lse, c.tq, c.tk, c.tv, c.shape);
    for (int i = 0; i < 40; ++i)
        EXPECT((std::isnan(values(c.out)[i * 8]) == (i >= 20) && std::isnan(values(c.lse)[i]) == (i >= 20)));
}

TEST_CASE("attention: gradients of q, k and v") {
    for (const AttentionShape& s : {AttentionShape{2, 7, 7, 4, 2, 4, true},
                                    {1, 3, 9, 2, 1, 6, true},
                                    {1, 9, 4, 2, 2, 4, false},
                                    {1, 66, 66, 1, 1, 2, true}})
        for (const auto& [dtype, forward, bound] : kAccuracies) {
            Case c(s, dtype);
            INFO("attention_backward " << name_of(dtype) << ", Tq " << s.query_len << " Tk " << s.key_len << " D "
                                       << s.head_dim << " causal " << s.causal);
            Tensor dq = Tensor::like(c.tq), dk = Tensor::like(c.tk), dv = Tensor::like(c.tv);
            attention_backward(dq, dk, dv, c.tdout, c.tq, c.tk, c.tv, c.out, c.lse, s);
            const auto f = [&](const Doubles& q, const Doubles& k, const Doubles& v) {
                Doubles y = attention_double(q, k, v, s);
                y.resize(c.dout.size());
                return dot(y, c.dout);
            };
            EXPECT(distance(dq, differentiate([&](const Doubles& x) { return f(x, c.k, c.v); }, c.q)) <= bound);
            EXPECT(distance(dk, differentiate([&](const Doubles& x) { return f(c.q, x, c.v); }, c.k)) <= bound);
            EXPECT(distance(dv, differentiate([&](const Doubles& x) { return f(c.q, c.k, x); }, c.v)) <= bound);
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

TEST_CASE("merge_attention: two sets of keys give what both together give; a set without keys adds nothing") {
    const int64_t R = 6, H = 3, D = 5;
    for (DType dtype : {DType::f32, DType::bf16, DType::f64}) {
        INFO("merge_attention " << name_of(dtype) << ", R " << R << " H " << H << " D " << D);
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
    EXPECT(workspace(1024) <= 4 * workspace(256));  // the tiles themselves do not grow
}

namespace {

// out, lse, dq, dk and dv, tiled or naive, with gradients of their own dtype.
std::array<Tensor, 5> run(bool naive, const AttentionShape& s, DType dtype, DType gradients, double size,
                          double poison = 0, const DocumentStarts& documents = {}) {
    const int64_t rows = s.batch * s.query_len, keys = s.batch * s.key_len, E = s.heads * s.head_dim,
                  K = s.kv_heads * s.head_dim;
    const auto make = [&](int64_t r, int64_t c, uint64_t key) {
        Doubles x = randoms(r * c, key);
        for (double& number : x) number *= size;
        if (key == 1 && poison != 0) x[(rows - 1) * E] = poison;  // the last query of the first head
        Tensor t({r, c}, dtype, Device::cpu);
        copy(t, doubles(x, {r, c}));
        return t;
    };
    const Tensor q = make(rows, E, 1), k = make(keys, K, 2), v = make(keys, K, 3), dout = make(rows, E, 4);
    Tensor out = Tensor::like(q), lse({rows, s.heads}, stats_dtype(dtype), Device::cpu);
    Tensor dq(q.shape(), gradients, Device::cpu), dk(k.shape(), gradients, Device::cpu),
        dv(v.shape(), gradients, Device::cpu);
    if (naive) {
        naive_attention(out, lse, q, k, v, s, documents);
        naive_attention_backward(dq, dk, dv, dout, q, k, v, out, lse, s, documents);
    } else {
        attention(out, lse, q, k, v, s, documents);
        attention_backward(dq, dk, dv, dout, q, k, v, out, lse, s, documents);
    }
    return {out, lse, dq, dk, dv};
}

}  // namespace

TEST_CASE("attention: every set of kernels equals the definition, in fp32, bf16 and fp64, at awkward shapes") {
    struct Precision {
        DType dtype, gradients;
        double bound;
    };
    const cpu::AttentionKernels* best = cpu::chosen_attention();
    for (const cpu::AttentionKernels* kernels : {&cpu::kPortableAttention, cpu::avx512_attention()}) {
        if (!kernels) continue;  // this machine has only one
        cpu::chosen_attention() = kernels;
        for (const Precision& p : {Precision{DType::f32, DType::f32, 2e-6},
                                   {DType::bf16, DType::f32, 6e-3},
                                   {DType::bf16, DType::bf16, 8e-3},
                                   {DType::f64, DType::f64, 1e-14}})
            for (const AttentionShape& s : {AttentionShape{2, 5, 5, 4, 2, 6, true},
                                            {1, 129, 129, 2, 1, 16, true},
                                            {2, 70, 130, 4, 1, 10, true},
                                            {1, 130, 70, 2, 2, 4, true},
                                            {1, 67, 200, 3, 3, 34, false},
                                            {1, 1, 100, 2, 1, 256, false},
                                            {1, 72, 72, 2, 1, 64, true}}) {
                INFO((kernels == &cpu::kPortableAttention ? "portable " : "AVX-512 ")
                     << name_of(p.dtype) << " Tq " << s.query_len << " Tk " << s.key_len << " D " << s.head_dim);
                const auto got = run(false, s, p.dtype, p.gradients, 1),
                           expected = run(true, s, p.dtype, p.gradients, 1);
                for (int i = 0; i < 5; ++i) {
                    Doubles a = numbers(got[i]), b = numbers(expected[i]);
                    for (size_t x = 0; x < a.size(); ++x)  // lse of a query that sees no key
                        if (std::isinf(a[x]) && a[x] == b[x]) a[x] = b[x] = 0;
                    EXPECT(distance(a, b) <= p.bound);
                }
            }
        for (double poison : {std::nan(""), double(INFINITY)}) {  // a NaN among the logits is not hidden
            const AttentionShape s{1, 40, 40, 2, 1, 8, true};
            const auto got = run(false, s, DType::f32, DType::f32, 1, poison);
            EXPECT(std::isnan(numbers(got[0])[39 * 16]));
            EXPECT(std::isnan(numbers(got[1])[39 * 2]));
            for (int i = 2; i < 5; ++i) EXPECT(std::isnan(numbers(got[i])[i == 2 ? 39 * 16 : 0]));
            EXPECT(std::isfinite(numbers(got[0])[38 * 16]));
        }
    }
    cpu::chosen_attention() = best;
}

namespace {

// Both numbers of a query that sees no key are -inf: they become 0.
double masked_distance(const Tensor& got, const Tensor& expected) {
    Doubles a = numbers(got), b = numbers(expected);
    for (size_t x = 0; x < a.size(); ++x)
        if (std::isinf(b[x]) && a[x] == b[x]) a[x] = b[x] = 0;
    return distance(a, b);
}

}  // namespace

TEST_CASE("documents: every set of kernels equals the definition at random boundaries, on and off the diagonal") {
    struct Blocks {
        AttentionShape shape;  // with the index of the first key
        int64_t query_offset;  // of the first query
    };
    const cpu::AttentionKernels* best = cpu::chosen_attention();
    int64_t blind = 0;
    for (const cpu::AttentionKernels* kernels : {&cpu::kPortableAttention, cpu::avx512_attention()}) {
        if (!kernels) continue;
        cpu::chosen_attention() = kernels;
        for (const auto& [s, query_offset] : {Blocks{{2, 5, 5, 4, 2, 6, true}, 0},
                                              {{2, 150, 150, 2, 1, 16, true}, 0},
                                              {{3, 72, 72, 3, 3, 10, true}, 0},
                                              {{1, 64, 64, 2, 1, 64, true, 128}, 128},  // a ring step on the diagonal
                                              {{2, 70, 70, 4, 2, 8, false, 70}, 140},   // and off it
                                              {{2, 75, 75, 2, 1, 8, false, 0}, 150},    // keys farther back
                                              {{1, 40, 190, 2, 2, 12, true, 0}, 150}})  // an all-gather's keys
            for (const int64_t mean : {1, 3, 20, 90, 1000})
                for (const bool ordered : {true, false})
                    for (const DType dtype : {DType::f64, DType::f32}) {
                        if (dtype == DType::f32 && mean != 20) continue;
                        const auto starts = random_starts(s, query_offset, mean, ordered, uint64_t(mean));
                        const DocumentStarts documents(starts, Device::cpu);
                        const auto got = run(false, s, dtype, dtype, 1, 0, documents);
                        const auto expected = run(true, s, dtype, dtype, 1, 0, documents);
                        INFO((kernels == &cpu::kPortableAttention ? "portable " : "AVX-512 ")
                             << name_of(dtype) << " Tq " << s.query_len << " Tk " << s.key_len << " offset "
                             << s.key_offset << " mean " << mean << " ordered " << ordered);
                        for (int i = 0; i < 5; ++i)
                            EXPECT(masked_distance(got[i], expected[i]) <= (dtype == DType::f64 ? 1e-13 : 4e-6));
                        double pairs = 0;
                        for (int64_t b = 0; b < s.batch; ++b)
                            for (int64_t i = 0; i < s.query_len; ++i) {
                                int64_t seen = 0;
                                for (int64_t j = 0; j < s.key_len; ++j)
                                    seen += (!s.causal || j <= i + s.key_len - s.query_len) &&
                                            j + s.key_offset >= starts[size_t(b * s.query_len + i)];
                                pairs += double(seen * s.heads);
                                blind += seen == 0;
                                EXPECT((seen == 0) ==
                                       std::isinf(numbers(got[1])[size_t((b * s.query_len + i) * s.heads)]));
                            }
                        EXPECT(visible_pairs(s, documents) == pairs);
                    }
    }
    EXPECT(blind > 1000);
    cpu::chosen_attention() = best;
}

TEST_CASE("documents: one per sequence changes no bit; those of one token give v; a query sees nothing of the others") {
    const AttentionShape s{2, 100, 100, 4, 2, 16, true};
    const std::vector<int32_t> zeros(200, 0);
    const auto plain = run(false, s, DType::f32, DType::f32, 1);
    const auto one = run(false, s, DType::f32, DType::f32, 1, 0, DocumentStarts(zeros, Device::cpu));
    for (int i = 0; i < 5; ++i) EXPECT(numbers(one[i]) == numbers(plain[i]));
    EXPECT(visible_pairs(s) == visible_pairs(s, DocumentStarts(zeros, Device::cpu)));
    EXPECT(visible_pairs(s) == 2 * 4 * 100 * 101 / 2);

    std::vector<int32_t> self;
    for (int32_t i = 0; i < 200; ++i) self.push_back(i % 100);
    const auto alone = run(false, s, DType::f64, DType::f64, 1, 0, DocumentStarts(self, Device::cpu));
    const Doubles v = randoms(200 * 2 * 16, 3), out = numbers(alone[0]);
    for (size_t row = 0; row < 200; ++row)
        for (size_t h = 0; h < 4; ++h)
            for (size_t d = 0; d < 16; ++d) REQUIRE(out[row * 64 + h * 16 + d] == v[row * 32 + h / 2 * 16 + d]);
    for (const double x : numbers(alone[2])) EXPECT(std::abs(x) <= 1e-14);

    CatchChecks catching;
    std::vector<int32_t> descending = zeros;
    descending[3] = 2;
    EXPECT_THROWS_AS(run(false, s, DType::f32, DType::f32, 1, 0, DocumentStarts(descending, Device::cpu)), CheckFailed);
}

// No batch has them, but the operation promises out = 0 and no gradient. Every other sequence is one document: what its
// tiles leave behind must not be taken for scores.
TEST_CASE("documents: queries whose document begins behind them see nothing and pass nothing back") {
    for (int64_t shift = 0; shift < 8; ++shift)
        for (int32_t behind = 1; behind <= 8; ++behind) {
            const AttentionShape s{4, 40, 150 + shift, 1, 1, 8, true};
            std::vector<int32_t> starts;
            for (int64_t b = 0; b < 4; ++b)
                for (int64_t i = 0; i < 40; ++i)
                    starts.push_back(b % 2 == 0 || i < 20 ? 0 : int32_t(110 + shift + i) + behind);
            const DocumentStarts documents(starts, Device::cpu);
            const auto got = run(false, s, DType::f64, DType::f64, 1, 0, documents);
            const auto expected = run(true, s, DType::f64, DType::f64, 1, 0, documents);
            INFO("shift ", shift, ", begins ", behind, " behind");
            for (int i = 0; i < 5; ++i) EXPECT(masked_distance(got[i], expected[i]) <= 1e-13);
        }
}

TEST_CASE("documents: what they hide is not computed: a NaN among other documents' keys and queries stays there") {
    const AttentionShape s{1, 256, 256, 2, 1, 16, true};
    std::vector<int32_t> starts(256, 0);
    std::fill(starts.begin() + 64, starts.end(), 64);
    std::fill(starts.begin() + 192, starts.end(), 192);
    // The last query of the first head is not a number, so the third document's gradients are not.
    const auto got = run(false, s, DType::f32, DType::f32, 1, std::nan(""), DocumentStarts(starts, Device::cpu));
    for (int i = 2; i < 5; ++i) {
        const Doubles gradient = numbers(got[i]);
        const size_t width = gradient.size() / 256;
        for (size_t row = 0; row < 192; ++row) EXPECT(std::isfinite(gradient[row * width]));
        EXPECT(std::isnan(gradient[(i == 2 ? 255 : 192) * width]));
    }
}

TEST_CASE("attention: the same bits from any number of threads") {
    const AttentionShape s{3, 70, 70, 4, 2, 16, true};
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    const auto one = run(false, s, DType::f32, DType::f32, 1);
    omp_set_num_threads(5);
    const auto five = run(false, s, DType::f32, DType::f32, 1);
    omp_set_num_threads(threads);
    for (int i = 0; i < 5; ++i) EXPECT(numbers(one[i]) == numbers(five[i]));
}
