// Muon: Newton-Schulz beside plain loops, an update by hand, what it takes and keeps; and who owns which matrix.
#include <numeric>

#include "01_single_gpu/complete/muon.h"
#include "tests/training.h"

using namespace train70b;
using namespace train70b::test;

namespace {

using Values = std::vector<double>;

Values product(const Values& a, const Values& b, int64_t m, int64_t k, int64_t n) {
    Values c(size_t(m * n), 0);
    for (int64_t i = 0; i < m; ++i)
        for (int64_t p = 0; p < k; ++p)
            for (int64_t j = 0; j < n; ++j) c[size_t(i * n + j)] += a[size_t(i * k + p)] * b[size_t(p * n + j)];
    return c;
}

Values transposed(const Values& a, int64_t m, int64_t n) {
    Values t(a.size());
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) t[size_t(j * m + i)] = a[size_t(i * n + j)];
    return t;
}

// X <- a X + (b X X^T + c (X X^T)^2) X, five times from X / |X|.
Values newton_schulz(Values x, int64_t m, int64_t n) {
    const double norm = std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
    for (double& value : x) value /= norm;
    for (int step = 0; step < 5; ++step) {
        const Values A = product(x, transposed(x, m, n), m, n, m), AA = product(A, A, m, m, m);
        Values B(A.size());
        for (size_t i = 0; i < B.size(); ++i) B[i] = -4.7750 * A[i] + 2.0315 * AA[i];
        const Values Bx = product(B, x, m, m, n);
        for (size_t i = 0; i < x.size(); ++i) x[i] = 3.4445 * x[i] + Bx[i];
    }
    return x;
}

}  // namespace

TEST_CASE("Newton-Schulz: plain loops' to 1e-12, of wide, tall and square matrices; singular values near 1") {
    for (const auto& [m, n] : {std::pair<int64_t, int64_t>{5, 12}, {12, 5}, {8, 8}, {1, 7}, {7, 1}}) {
        const Values g = randoms(m * n, uint64_t(m));
        const Tensor x = orthogonalized(tensor(g, {m, n}, DType::f64), DType::f64);
        INFO(m, " x ", n);
        EXPECT(distance(x, newton_schulz(g, m, n)) <= 1e-12);
    }
    Values diagonal(6 * 6, 0);
    for (size_t i = 0; i < 6; ++i) diagonal[i * 7] = std::pow(0.4, double(i)) * (i % 2 ? -1 : 1);
    const Values x = values(orthogonalized(tensor(diagonal, {6, 6}, DType::f64), DType::f64));
    for (size_t i = 0; i < 36; ++i) {
        if (i % 7 > 0) EXPECT(x[i] == 0);
        if (i % 7 == 0) EXPECT((std::abs(x[i]) > 0.65 && std::abs(x[i]) < 1.25 && (x[i] > 0) == (diagonal[i] > 0)));
    }
    const Tensor zero = orthogonalized(tensor(Values(12, 0), {3, 4}, DType::f64), DType::f64);
    EXPECT(values(zero) == Values(12, 0));
}

TEST_CASE("Muon: two updates by hand, Nesterov, decay and size; a stack of matrices is each by itself") {
    Param one = make_param("model.layers.0.mlp.down_proj.weight", {4, 6}, 1);
    Param stack = make_param("model.layers.0.mlp.experts.down_proj", {8, 6}, 1), vector = make_param("norm", {6}, 0);
    stack.matrices = 2;
    const std::vector<Param*> params = {&one, &stack, &vector};
    const Values start = randoms(78, 1);
    bind_data(params, tensor(start, {78}, DType::f64));
    Tensor grads({78}, DType::f64, Device::cpu, Memory::grads);
    bind_grads(params, grads);
    const MemoryBytes before = ledger().now();
    Muon muon(full_segments(params), {.weight_decay = 0.5}, std::make_shared<Orthogonalizer>(), Memory::optimizer);
    EXPECT(ledger().now()[size_t(Memory::optimizer)] - before[size_t(Memory::optimizer)] == 8 * (24 + 48 + 2 * 6));

    Values w = start, momentum(72, 0);
    for (int64_t step = 1; step <= 2; ++step) {
        const Values g = randoms(78, uint64_t(10 + step));
        copy(grads, tensor(g, {78}, DType::f64));
        muon.prepare(0.25);
        muon.update(step, 0.1, 0.25);
        for (size_t begin = 0; begin < 72; begin += 24) {
            Values u(24);
            for (size_t i = 0; i < 24; ++i) {
                double& m = momentum[begin + i];
                m = 0.95 * m + 0.05 * 0.25 * g[begin + i];
                u[i] = 0.05 * 0.25 * g[begin + i] + 0.95 * m;
            }
            u = newton_schulz(u, 4, 6);
            for (size_t i = 0; i < 24; ++i)
                w[begin + i] = w[begin + i] * (1 - 0.1 * 0.5) - 0.1 * 0.2 * std::sqrt(6.0) * u[i];
        }
    }
    EXPECT(distance(one.data, Values(w.begin(), w.begin() + 24)) <= 1e-12);
    EXPECT(distance(stack.data, Values(w.begin() + 24, w.begin() + 72)) <= 1e-12);
    EXPECT(distance(vector.data, Values(start.begin() + 72, start.end())) > 0.1);  // by AdamW
    std::vector<std::string> visited;
    muon.for_each_state([&](const Segment& segment, const char* state, Tensor&) {
        visited.push_back(segment.param->name.substr(0, 7) + " " + state);
    });
    EXPECT(visited == std::vector<std::string>{"model.l weight", "model.l exp_avg", "model.l weight", "model.l exp_avg",
                                               "norm weight", "norm exp_avg", "norm exp_avg_sq"});
}

TEST_CASE("Muon takes the matrices of blocks: not embedding, head, norms or biases") {
    const LlamaConfig c = preset("tiny");
    const int64_t block = c.hidden * (2 * c.q_width() + 2 * c.kv_width() + 3 * c.ffn);
    EXPECT(muon_elements(c) == c.layers * block);
    EXPECT(!takes_muon(make_param("model.embed_tokens.weight", {8, 4}, 1)));
    EXPECT(!takes_muon(make_param("lm_head.weight", {8, 4}, 1)));
    EXPECT(!takes_muon(make_bias("model.layers.0.self_attn.q_proj.bias", 8)));
    EXPECT(takes_muon(make_param("model.layers.0.mlp.gate.weight", {8, 4}, 1)));
    EXPECT_USAGE_ERROR(check_muon(true), "--optimizer muon: its updates have one size at any width, --mup is AdamW's");
    EXPECT_USAGE_ERROR(check_muon(false, true), "--offload: --optimizer muon's products are the device's");
}
