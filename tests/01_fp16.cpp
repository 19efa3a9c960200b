// --dtype fp16: the conversion, the loss scale, and runs whose gradients overflow or vanish.
#include "01_single_gpu/complete/fp16.h"
#include "01_single_gpu/ops/round_fp16.h"
#include "tests/training.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// Of 16 bits: sign, exponent with bias 15, mantissa.
double value_of(int bits) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double size = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    return bits >> 15 ? -size : size;
}

}  // namespace

TEST_CASE("fp16: every value stays, what lies between two goes to the nearer, ties to the even one") {
    for (int bits = 0; bits < 0x7c00; ++bits) {
        const double here = value_of(bits), next = value_of(bits + 1), middle = (here + next) / 2;
        for (const double sign : {1.0, -1.0}) {
            EXPECT(double(to_fp16(float(sign * here))) == sign * here);
            const double even = bits % 2 == 0 ? here : bits + 1 == 0x7c00 ? INFINITY : next;
            const double above = bits + 1 == 0x7c00 ? INFINITY : next;
            EXPECT(double(to_fp16(float(sign * middle))) == sign * even);
            EXPECT(double(to_fp16(std::nextafter(float(sign * middle), 0.0f))) == sign * here);
            EXPECT(double(to_fp16(std::nextafter(float(sign * middle), float(sign * 1e30)))) == sign * above);
        }
    }
    EXPECT(std::signbit(to_fp16(-0.0f)));
    EXPECT(to_fp16(-INFINITY) == -INFINITY);
    EXPECT(std::isnan(to_fp16(NAN)));
}

// Each number shows one rounding: d and e are lost beside 1, and what is left of 1 - 1 is 0.
TEST_CASE("fp16: a product rounds operands, result and gradients on their way; the weights' gradient is fp32") {
    LlamaConfig config;
    config.layers = 1, config.hidden = config.ffn = config.vocab = 2, config.heads = config.kv_heads = 1;
    Llama model(config, {});
    model.materialize(1);
    use_fp16_products(model);
    const double d = 0.9 * 0x1p-11, e = 0x1p-12;
    const auto cpu = [](const std::vector<double>& x, const Shape& s) { return tensor(x, s, DType::f32, Device::cpu); };
    copy(model.lm_head.data, cpu({1 + d, -1, 1, e}, {2, 2}));
    const Var x{.data = cpu({1, 1, 1 + d, 1, 1, e}, {3, 2})};
    Tape tape;
    const Var y = model.head(tape, x);
    *y.grad = cpu({1 + d, -1, 1, 1, 1, 0}, {3, 2});
    tape.backward();
    EXPECT(values(y.data) == std::vector<double>{0, 1, 0, 1, 1, 1});
    EXPECT(values(*x.grad) == std::vector<double>{0, -1, 2, -1, 1, -1});
    EXPECT(values(model.lm_head.grad) == std::vector<double>{3, 2 + e, 0, 0});
}

TEST_CASE(
    "loss scale: halved by an overflow, doubled after 2000 steps without; a fixed one stays; kept in checkpoints") {
    LossScale scale(0), fixed(3);
    StepReport report;
    const auto ends = [&report](LossScale& of, bool overflowed) {
        report.grad_norm = overflowed ? INFINITY : 1;
        of.end_step({}, report, !overflowed);
        return of.scale();
    };
    EXPECT(scale.scale() == 65536);
    EXPECT(ends(scale, true) == 32768);
    EXPECT(report.loss_scale == 65536);
    for (int step = 1; step < LossScale::kGrowEvery; ++step) EXPECT(ends(scale, false) == 32768);
    LossScale resumed(0);
    resumed.restore(scale.rows());
    EXPECT(ends(scale, false) == 65536);
    EXPECT(ends(resumed, false) == 65536);
    EXPECT(ends(resumed, true) == 32768);
    for (int step = 0; step < 15; ++step) ends(resumed, true);
    EXPECT(resumed.scale() == 1);
    EXPECT_THROWS_AS(ends(resumed, true), CommonError);
    EXPECT(ends(fixed, true) == 3);
}

// The gradients of one step become infinite.
struct OverflowAt : RunControl {
    Session& session;
    const int64_t at;
    std::vector<double> before;
    OverflowAt(Session& s, int64_t step) : session(s), at(step) { s.trainer.controls.push_back(this); }
    void gradients_ready(int64_t step) override {
        if (step == at) before = session.weights();
        for (Param* param : session.model.params())
            if (step == at) scale(param->grad, INFINITY);
    }
};

TEST_CASE(
    "--dtype fp16: close to fp32; a step that overflows is left out; a small scale loses gradients, a large one all") {
    const Text text;
    TrainOptions o = tiny(text);
    o.steps = 3;
    const auto run = [&o](const char* dtype, double fixed = 0) {
        o.dtype = dtype, o.loss_scale = fixed;
        return std::make_unique<Session>(o);
    };
    const auto norm = [](Session& s) { return s.run().reports[0].grad_norm; };
    o.eps = 1, o.clip = 0;  // an update is as large as its gradient
    const auto exact_run = run("fp32"), half_run = run("fp16");
    const double exact = norm(*exact_run), half = norm(*half_run);
    EXPECT((half != exact && std::abs(half / exact - 1) <= 1e-3));
    for (size_t step = 0; step < 3; ++step)
        EXPECT(std::abs(half_run->reports[step].loss / exact_run->reports[step].loss - 1) <= 1e-3);
    const std::vector<double> start = run("fp32")->weights();
    EXPECT(distance(minus(half_run->weights(), start), minus(exact_run->weights(), start)) <= 0.02);
    o.eps = 1e-8, o.clip = 1;
    EXPECT(norm(*run("fp16", 1)) != half);
    EXPECT(std::abs(norm(*run("fp16", 2e-7)) / exact - 1) >= 0.1);
    EXPECT_THROWS_AS(run("fp16", 1e10)->run(), CommonError);

    const auto overflows = run("fp16");
    const OverflowAt overflow(*overflows, 2);
    std::vector<double> after;
    overflows->on_step = [&](const StepReport& report) {
        if (report.step == 2) after = overflows->weights();
    };
    overflows->run();
    const std::vector<StepReport>& reports = overflows->reports;
    EXPECT((!reports[0].overflowed && reports[1].overflowed && !reports[2].overflowed));
    EXPECT((reports[1].loss_scale == 65536 && reports[2].loss_scale == 32768));
    EXPECT(after == overflow.before);
    EXPECT(overflows->weights() != after);
}
