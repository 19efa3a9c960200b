// A model with its layers in 8 bits, on one rank: the products, the loss, memory, recomputation, what is not finite.
#include <numeric>

#include "07_fp8/complete/training_report.h"
#include "tests/fp8.h"
#include "tests/product_errors.h"

using namespace train70b;
using namespace train70b::test;

namespace {

struct Narrow {
    Fp8 fp8;
    std::unique_ptr<LocalStore> store;
    Session session;
    Narrow(const TrainOptions& o, const std::string& recipe, const std::string& optimizer = "adamw")
        : session(o, [&](Session& s) {
              fp8 = apply_fp8(s.model, {.recipe = recipe}, o.micro_batch * o.seq_len);
              store = std::make_unique<LocalStore>(s.model, find_optimizer(optimizer).maker(o.adamw(), nullptr));
              s.trainer.store = store.get();
              if (fp8.recipe) s.trainer.step_states.push_back(fp8.recipe.get());
          }) {}
};

double mean_of_last_ten(const Session& session) {
    double sum = 0;
    for (size_t i = session.reports.size() - 10; i < session.reports.size(); ++i) sum += session.reports[i].loss / 10;
    return sum;
}

std::vector<double> values_of(const Quantized& q) { return values(dequantized(q)); }

std::vector<double> times(const std::vector<double>& a, const std::vector<double>& b,
                          int64_t K) {  // a (M, K) b (N, K)^T
    const int64_t M = int64_t(a.size()) / K, N = int64_t(b.size()) / K;
    std::vector<double> c(size_t(M * N));
    for (int64_t m = 0; m < M; ++m)
        for (int64_t n = 0; n < N; ++n)
            c[size_t(m * N + n)] =
                std::inner_product(a.begin() + m * K, a.begin() + (m + 1) * K, b.begin() + n * K, 0.0);
    return c;
}

}  // namespace

TEST_CASE("a layer's three products are those of its quantized operands, in double, to 1e-6; weight gradients add up") {
    const Text text;
    const int64_t R = 128, in = 128, out = 256;
    for (const std::string& name : kRecipes)
        for (const bool recompute : {false, true}) {  // x recomputed for the backward pass, or its FP8 data kept
            TrainOptions o = divisible(text);
            Narrow narrow(o, name);
            Block& block = narrow.session.model.blocks[1];
            Linear& layer = block.qkv;
            const Tensor x = tensor(randoms(R * in, 5), {R, in}), dy = tensor(randoms(R * out, 6), {R, out});
            const auto recipe = make_recipe({.recipe = name}, 24, Device::cpu, Comm());
            const QuantizedPair of_x = recipe->quantize({Operand::input, 0}, x, Usage::both, false);
            const QuantizedPair of_w = recipe->quantize({Operand::weight, 1}, layer.weight(), Usage::both, false);
            const Operand& gradient = narrow.fp8.layers[4]->gradient;
            QuantizedPair of_dy;
            std::vector<double> dw(size_t(out * in));
            for (int pass = 0; pass < 2; ++pass) {  // nvfp4: each by its own random numbers
                of_dy = recipe->quantize(gradient, dy, Usage::both, false);
                const std::vector<double> each = times(values_of(of_dy.columnwise), values_of(of_x.columnwise), R);
                for (size_t i = 0; i < dw.size(); ++i) dw[i] += each[i];
            }

            Tensor y, dx;
            for (int pass = 0; pass < 2; ++pass) {
                Tape tape;
                Var input{.data = x};
                if (recompute) input.recomputed = Lazy<Tensor>([x] { return x; });
                Var result = layer(tape, input);
                y = result.data;
                *result.grad = dy;
                tape.backward();
                dx = *input.grad;
            }
            INFO(name, ", recompute ", recompute);
            EXPECT(distance(y, times(values_of(of_x.rowwise), values_of(of_w.rowwise), in)) <= 1e-6);
            EXPECT(distance(dx, times(values_of(of_dy.rowwise), values_of(of_w.columnwise), out)) <= 1e-6);
            EXPECT(distance(layer.grad(), dw) <= 1e-6);
        }
}

TEST_CASE("60 steps: within 0.03 of bf16's loss for every recipe and for 8-bit moments, and equal for none") {
    const Text text;
    TrainOptions o = divisible(text);
    o.dtype = "bf16";
    o.steps = 60;
    o.init_std = 0.02;
    o.seq_len = 64;
    Session wide(o);
    const double expected = mean_of_last_ten(wide.run());
    EXPECT(wide.reports[59].loss < wide.reports[0].loss - 1);  // it has learned something
    using Pair = std::pair<std::string, std::string>;
    std::vector<Pair> runs = {{"off", "adamw8bit"}, {"current", "adamw8bit"}};
    for (const std::string& recipe : kRecipes) runs.emplace_back(recipe, "adamw");
    int64_t number = 0;
    for (const auto& [recipe, optimizer] : runs) {
        const int64_t at = number++;
        if (!in_slice(at) && !in_slice(at + int64_t(runs.size()))) continue;  // six: each of the eight has one
        Narrow narrow(o, recipe, optimizer);
        narrow.session.run();
        INFO(recipe, ", ", optimizer, ": ", mean_of_last_ten(narrow.session) - expected);
        EXPECT(std::abs(mean_of_last_ten(narrow.session) - expected) <= 0.03);
        EXPECT(narrow.session.history() != wide.history());
    }
}

TEST_CASE("gradients at step 1 differ from those of fp32 by the noise of 8 bits: not less, not more") {
    const Text text;
    TrainOptions o = divisible(text);
    o.steps = 1;
    Session wide(o);
    wide.run();
    for (const std::string& recipe : kRecipes) {
        Narrow narrow(o, recipe);
        narrow.session.run();
        for (size_t i = 0; i < wide.gradients.size(); ++i) {
            const double noise = distance(narrow.session.gradients[i], wide.gradients[i]);
            INFO(recipe, ", ", wide.names[i], ": ", noise);
            EXPECT(noise <= (recipe == "nvfp4" ? 0.9 : 0.25));  // of 4 bits, and rounded at random
            EXPECT(noise >= 1e-3);
        }
    }
}

TEST_CASE("recomputation changes nothing, bit for bit; nor does evaluation between the steps") {
    const Text text;
    int64_t number = 0;
    int64_t recipes = 0;
    for (const std::string& recipe : kRecipes) {
        if (!in_half(recipes++)) continue;
        TrainOptions o = divisible(text);
        o.val_fraction = 0.2;
        Narrow plain(o, recipe);
        plain.session.run();
        for (const char* recompute : {"pointwise", "selective", "full", "none, evaluated"}) {
            if (!in_quarter(number++)) continue;
            o.recompute = recompute == std::string("none, evaluated") ? "none" : recompute;
            o.eval_every = recompute == std::string("none, evaluated") ? 1 : 0;
            Narrow other(o, recipe);
            other.session.run();
            INFO(recipe, ", recompute ", std::string(recompute));
            EXPECT(other.session.history() == plain.session.history());
            EXPECT(other.session.weights() == plain.session.weights());
            o.eval_every = 0;
        }
        // Delayed scales are of earlier steps: from the second step on they are not those of now.
        Narrow current(o, "current");
        o.recompute = "none";
        if (recipe == "delayed") {
            current.session.run();
            EXPECT(current.session.history()[0] == plain.session.history()[0]);
            EXPECT(current.session.history()[7] != plain.session.history()[7]);
        }
    }
}

TEST_CASE("accumulation, gradients in bf16, evaluation of any number of rows: repeatable, and it learns") {
    const Text text;
    int64_t number = 0;
    for (const std::string& recipe : kRecipes)
        for (const char* grad_dtype : {"fp32", "bf16"}) {
            if (!in_slice(number++)) continue;
            TrainOptions o = divisible(text);
            o.dtype = "bf16";
            o.grad_dtype = grad_dtype;
            o.steps = 8;
            o.micro_batch = 4;  // 128 rows
            Narrow plain(o, recipe);
            plain.session.run();
            o.val_fraction = 0.2;
            Narrow whole(o, recipe);
            whole.session.run();
            o.eval_every = 1;
            Narrow parts(o, recipe);
            REQUIRE(parts.session.data.validation_samples() % 4 != 0);  // the last batch has other rows
            REQUIRE(parts.fp8.layers.size() == 8);
            parts.session.run();
            INFO(recipe, ", gradients in ", std::string(grad_dtype));
            EXPECT(parts.session.history() == whole.session.history());  // validation leaves no trace
            EXPECT(plain.session.reports[7].loss < plain.session.reports[0].loss);
            // The batch in one piece: scales of other tensors, and the same gradient but for the noise of 8 bits.
            o.micro_batch = 8;
            Narrow once(o, recipe);
            once.session.run();
            Farthest worst;
            for (size_t i = 0; i < once.session.gradients.size(); ++i)
                worst.add(distance(once.session.gradients[i], whole.session.gradients[i]), once.session.names[i]);
            INFO(worst);
            EXPECT(worst <= (recipe == "nvfp4" ? 0.9 : 0.25));
        }
}

TEST_CASE("activations: a byte instead of two or four for what layers keep, by the formula within 1%") {
    const Text text;
    int64_t number = 0;
    for (const auto& [dtype, recompute, every] : {std::tuple("bf16", "none", 1),
                                                  {"fp32", "none", 1},
                                                  {"bf16", "full", 1},
                                                  {"bf16", "full", 2},
                                                  {"bf16", "selective", 1},
                                                  {"bf16", "pointwise", 1}}) {
        TrainOptions o = divisible(text);
        o.dtype = dtype;
        o.recompute = recompute;
        o.recompute_every = every;
        o.steps = 2;
        const int64_t rows = o.micro_batch * o.seq_len;
        const MemoryPeak of_wide = [&] {
            Session wide(o);
            wide.run();
            return wide.trainer.peak();
        }();
        const int64_t wide = of_wide.kind[size_t(Memory::activations)];
        for (const std::string& recipe : kRecipes) {
            if (!in_quarter(number++)) continue;
            Narrow narrow(o, recipe);
            narrow.session.run();
            const MemoryPeak& peak = narrow.session.trainer.peak();
            const int64_t measured = peak.kind[size_t(Memory::activations)];
            const int64_t formula = fp8_activations(o.model, rows, narrow.session.model.options.dtype,
                                                    narrow.session.model.options.recompute,
                                                    *make_recipe({.recipe = recipe}, 3, Device::cpu, Comm()), 1, every);
            INFO(std::string(dtype), ", ", std::string(recompute), " every ", every, ", ", recipe, ": ", measured,
                 ", formula ", formula, ", wide ", wide);
            EXPECT(std::abs(double(measured - formula)) <= 0.01 * double(formula));
            const int64_t least = (dtype == std::string("bf16") ? 1 : 3) * rows * 2 * 128;  // of one block's norms
            const bool made_again = recompute == std::string("selective") || recompute == std::string("pointwise");
            EXPECT((made_again ? measured == wide : measured <= wide - (least - rows * 17)));
            for (const Memory kind : {Memory::params, Memory::grads, Memory::optimizer})
                EXPECT(peak.kind[size_t(kind)] == of_wide.kind[size_t(kind)]);
        }
    }
}

TEST_CASE("infinities and what is not a number end the run with the non-finite error, whatever the recipe") {
    const Text text;
    int64_t number = 0;
    for (const std::string& recipe : kRecipes)
        for (const float bad : {INFINITY, NAN})
            for (const int where : {0, 1, 2}) {  // in a weight before the first step or after it, in an activation
                if (!in_quarter(number++)) continue;
                TrainOptions o = divisible(text);
                Narrow narrow(o, recipe);
                Session& s = narrow.session;
                Tensor& weight =
                    where == 2 ? s.model.blocks[0].input_norm.data : s.model.blocks[1].feed_forward->down_proj.data;
                const auto spoil = [&] { weight.data<float>()[77] = bad; };
                if (where != 1) spoil();
                s.on_step = [&](const StepReport&) {
                    if (where == 1) spoil();
                };
                INFO(recipe, ", ", bad, ", where ", where);
                EXPECT_THROWS_AS(s.trainer.run(), std::runtime_error);
                EXPECT(s.reports.size() == (where == 1 ? 1 : 0));
            }
}

TEST_CASE("layers whose sizes are not divisible stay as they are, and are named; --fp8-strict refuses them") {
    const Text text;
    TrainOptions o = divisible(text);
    o.model.ffn = 200;  // by 8
    Narrow some(o, "current");
    REQUIRE(some.fp8.left_out.size() == 1);
    EXPECT(some.fp8.left_out[0] == "down: 200 inputs (--ffn) on a rank are not divisible by 16 (try 208)");
    EXPECT(some.fp8.layers.size() == 6);
    some.session.run();
    EXPECT_USAGE_ERROR(check_fp8({.recipe = "current", .strict = true}, o.model, 256, 1),
                       "--fp8-strict on: --fp8 current: down: 200 inputs (--ffn)");
    check_fp8({.recipe = "current", .strict = false}, o.model, 256, 1);
    o.model.ffn = 208;
    check_fp8({.recipe = "current", .strict = true}, o.model, 256, 1);
    EXPECT_USAGE_ERROR(check_fp8({.recipe = "blockwise", .strict = true}, o.model, 256, 1), "416 outputs (--ffn)");
    EXPECT_USAGE_ERROR(check_fp8({.recipe = "current", .strict = true}, o.model, 264, 1), "264 rows of a micro-batch");
    check_fp8({.recipe = "off", .strict = true}, o.model, 263, 1);
    // None in 8 bits: the run that there would be without, bit for bit.
    o.model.ffn = 200;
    o.seq_len = 31;
    Session wide(o);
    wide.run();
    Narrow none(o, "blockwise");
    none.session.run();
    EXPECT(none.fp8.layers.size() == 0);
    EXPECT(none.fp8.left_out.size() == 4);
    EXPECT(none.session.history() == wide.history());
}

TEST_CASE("a product's error: what the chapter says of the recipes") {
    const std::vector<ProductErrors> errors = product_errors(64, 256, 256, 1);
    const auto of = [&](const std::string& name) {
        for (const ProductErrors& e : errors)
            if (e.recipe == name) return e;
        REQUIRE(false);
        return ProductErrors{};
    };
    EXPECT(of("bf16").normal <= 4e-3);
    for (const std::string name : {"current", "rowwise", "blockwise"}) {
        EXPECT(of(name).normal >= 0.03);
        EXPECT(of(name).normal <= 0.045);
    }
    EXPECT(of("current, all E5M2").normal >= 1.8 * of("current").normal);
    EXPECT(of("delayed, amax was x8").normal <= 1.02 * of("current").normal);
    EXPECT(of("delayed, amax was /8").normal >= 5 * of("current").normal);
    EXPECT(of("blockwise").tiny <= 0.8 * of("current").tiny);
    EXPECT(of("current").tiny <= of("current, all E4M3").tiny);
    const ProductErrors floor = of("mxfp8, scale: OCP floor"), up = of("mxfp8");
    EXPECT(up.normal <= 0.045);
    EXPECT(floor.normal >= 1.01 * up.normal);  // what lies beyond 448 scales is cut off, by up to an eighth
    EXPECT(floor.normal <= 2 * up.normal);
}
