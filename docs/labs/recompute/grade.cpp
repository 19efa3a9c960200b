// Grades the lab recompute.
#include "01_single_gpu/complete/llama.h"
#include "tests/labs.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr int64_t kRows = 6, kIn = 16, kWide = 64;

int64_t activations() { return ledger().now()[int(Memory::activations)]; }

// y = b(swiglu(a(x))): (R, 16) -> (R, 128) -> (R, 64) -> (R, 16).
struct Mlp {
    Param a = make_param("a", {2 * kWide, kIn}, 1), b = make_param("b", {kIn, kWide}, 1);
    Linear first, second;
    int64_t runs = 0;

    Mlp() {
        first.weights = {&a};
        second.weights = {&b};
        for (Param* param : {&a, &b}) {
            param->data = tensor(randoms(param->global_size(), param == &a), param->global_shape);
            param->grad = Tensor::like(param->data, Memory::grads);
            fill(param->grad, 0);
        }
    }
    Var run(Tape& tape, const Var& x) {
        ++runs;
        return second(tape, swiglu(tape, first(tape, x)));
    }
    Var recomputed(Tape& tape, const Var& x) {
        return recompute(tape, x, [this](Tape& t, const Var& in) { return run(t, in); });
    }
};

Tensor input() { return tensor(randoms(kRows * kIn, 5), {kRows, kIn}); }
Tensor output_gradient() { return tensor(randoms(kRows * kIn, 6), {kRows, kIn}); }

struct Result {
    std::vector<double> y, da, db;
    Tensor dx;
};

Result pass(bool recomputed) {
    Mlp mlp;
    Tape tape;
    Var x{.data = input()};
    Var y = recomputed ? mlp.recomputed(tape, x) : mlp.run(tape, x);
    const std::vector<double> out = values(y.data);
    *y.grad = output_gradient();
    tape.backward();
    return {out, values(mlp.a.grad), values(mlp.b.grad), *x.grad};
}

}  // namespace

TEST_CASE("lab: the output, and the gradients of the weights") {
    const Result kept = pass(false), again = pass(true);
    EXPECT(again.y == kept.y);
    figure("gradient of the first weights, its norm", std::sqrt(dot(again.da, again.da)),
           std::sqrt(dot(kept.da, kept.da)), "", "as without recomputation");
    EXPECT(again.da == kept.da);
    EXPECT(again.db == kept.db);
}

TEST_CASE("lab: the gradient of the input") {
    const std::vector<double> expected = values(pass(false).dx);
    const Tensor got = pass(true).dx;
    const std::vector<double> dx = got ? values(got) : std::vector<double>{0};
    figure("gradient of x, its norm", std::sqrt(dot(dx, dx)), std::sqrt(dot(expected, expected)), "",
           "as without recomputation", got ? "" : "x has no gradient: the second run's input needs x.grad.");
    EXPECT(dx == expected);
    // x + mlp(x): the residual branch adds to the same gradient first.
    double norms[2];
    for (const bool recomputed : {false, true}) {
        Mlp mlp;
        Tape tape;
        Var x{.data = input()};
        Var y = recomputed ? mlp.recomputed(tape, x) : mlp.run(tape, x);
        *add(tape, x, y).grad = output_gradient();
        tape.backward();
        const std::vector<double> sum = *x.grad ? values(*x.grad) : std::vector<double>{0};
        norms[recomputed] = std::sqrt(dot(sum, sum));
    }
    figure("gradient of x under a residual branch", norms[1], norms[0], "", "as without recomputation",
           got ? "What another branch had added is gone: x.grad is shared, and what reads x adds to it."
               : "x has no gradient: the second run's input needs x.grad.");
}

TEST_CASE("lab: what is kept between the passes") {
    Mlp mlp;
    Tape tape;
    Var x{.data = input()};
    const int64_t before = activations();
    Var y = mlp.recomputed(tape, x);
    const auto slot = y.grad;
    y = Var();
    const int64_t kept = activations() - before, none = 4 * kRows * (2 * kWide + kWide);
    figure("kept between the passes, besides x", kept, int64_t(0), "B", "nothing",
           kept >= none              ? "The first run records: its closures hold every activation of the body."
           : kept == 4 * kRows * kIn ? "The step keeps y's data: capture y.grad, not y."
                                     : "");
    *slot = output_gradient();
    x = Var();
    tape.backward();
    figure("kept after the backward pass", activations() - before + 4 * kRows * kIn, int64_t(0), "B", "nothing");
}

TEST_CASE("lab: the peak of a model's activations") {
    LlamaConfig c;
    c.layers = 6, c.hidden = 64, c.heads = 4, c.kv_heads = 2, c.ffn = 160, c.vocab = 100;
    const int64_t T = 64, before = activations();
    Llama model(c, {.recompute = Recompute::full});
    model.materialize(1);
    std::vector<int32_t> ids(T), positions(T);
    for (int64_t t = 0; t < T; ++t) ids[size_t(t)] = int32_t(t % c.vocab), positions[size_t(t)] = int32_t(t);
    const auto up = [&](const std::vector<int32_t>& v) { return upload(v, {T}, Device::cpu); };
    ledger().reset_peak();
    {
        Tape tape;
        model.forward(tape, {1, T, up(ids), up(ids), up(positions), 1.0 / double(T)});
        tape.backward();
    }
    const int64_t peak = ledger().peak().kind[int(Memory::activations)] - before;
    const auto formula = [&](Recompute level) { return activation_formula(c, 1, T, DType::f32, level).total; };
    figure("peak activations of 6 blocks", peak, formula(Recompute::full), "B", "inputs of all blocks + one block",
           double(peak) >= 0.9 * double(formula(Recompute::none)) ? "As without recomputation: The first run records."
                                                                  : "",
           0.02);
}

TEST_CASE("lab: how often the body runs") {
    Mlp mlp;
    Tape tape;
    Var y = mlp.recomputed(tape, Var{.data = input()});
    figure("runs in the forward pass", mlp.runs, int64_t(1), "", "one");
    *y.grad = output_gradient();
    tape.backward();
    figure("runs in both passes", mlp.runs, int64_t(2), "", "one in each");
    Tape silent{.recording = false};
    mlp.recomputed(silent, Var{.data = input()});
    figure("runs in evaluation", mlp.runs - 2, int64_t(1), "", "one");
}

TEST_CASE("lab: weight gradients that are deferred") {
    const std::vector<double> expected = pass(false).da;
    Mlp mlp;
    Tape::Steps later;
    Tape tape;
    tape.deferred_wgrads = &later;
    Var y = mlp.recomputed(tape, Var{.data = input()});
    *y.grad = output_gradient();
    tape.backward();
    figure("weight gradients put off", int64_t(later.size()), int64_t(2), "", "one for each of the two products",
           later.empty() ? "They were computed at once: the second run's tape has no deferred_wgrads." : "");
    for (const auto& step : later) step();
    EXPECT(values(mlp.a.grad) == expected);
}
