// muP: at the base width nothing changes; at others, what a few steps change stays of one size.
#include "01_single_gpu/complete/hf/hf.h"
#include "tests/training.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr int64_t kBase = 64, kHead = 16;

TrainOptions of_width(const Text& text, int64_t width, bool mup) {
    TrainOptions o = of_model(tiny(text),
                              {.layers = 2,
                               .hidden = width,
                               .heads = width / kHead,
                               .kv_heads = width / kHead,
                               .ffn = 2 * width,
                               .vocab = 256},
                              16, 8);
    o.init_std = 0.125;  // 1 / sqrt(kBase)
    o.lr = o.min_lr = 4e-3;
    o.warmup_steps = 0;
    o.steps = 4;
    if (mup) o.mup = kBase;
    return o;
}

double rms(const std::vector<double>& x) { return std::sqrt(dot(x, x) / double(x.size())); }

// How much the first steps change what the model computes for one batch: the output of the last block, the logits that
// the loss sees.
struct Coordinates {
    double hidden, logits;
};
Coordinates change(const TrainOptions& o) {
    Session session(o);
    const auto look = [&] {
        std::pair<std::vector<double>, std::vector<double>> seen;
        auto& wrappers = session.model.blocks.back().unit.wrappers;
        wrappers.push_back([&](Tape& tape, const Var& x, const Unit::Body& body) {
            Var y = body(tape, x);
            seen.first = values(y.data);
            return y;
        });
        Tape tape{.recording = false};
        seen.second = values(session.model.logits(tape, session.trainer.micro_batch(1, 0)).data);
        for (double& x : seen.second) x *= session.model.loss_options.logit_scale;
        wrappers.pop_back();
        return seen;
    };
    const auto before = look();
    session.run();
    const auto after = look();
    return {rms(minus(after.first, before.first)), rms(minus(after.second, before.second))};
}

}  // namespace

TEST_CASE("muP at its base width is the run without it, bit for bit") {
    const Text text;
    for (const char* dtype : {"fp32", "bf16", "fp64"}) {
        TrainOptions o = of_width(text, kBase, false);
        o.dtype = dtype;
        Session plain(o);
        plain.run();
        o.mup = kBase;
        Session mup(o);
        mup.run();
        EXPECT(mup.history() == plain.history());
        EXPECT(mup.weights() == plain.weights());
    }
}

TEST_CASE("muP's initial values, learning rates and logits at four times the base width") {
    const Text text;
    const TrainOptions o = of_width(text, 4 * kBase, true), standard = of_width(text, 4 * kBase, false);
    Session mup(o), plain(standard);
    EXPECT(mup.model.loss_options.logit_scale == 0.25);
    EXPECT(plain.model.loss_options.logit_scale == 1);
    const std::vector<Param*> a = mup.model.params(), b = plain.model.params();
    REQUIRE(a.size() == b.size());
    for (size_t i = 0; i < a.size(); ++i) {
        INFO(a[i]->name);
        const bool hidden = a[i]->is_matrix() && a[i]->name.find("layers.") != std::string::npos;
        EXPECT(a[i]->lr_scale == (hidden ? 0.25 : 1));
        EXPECT(b[i]->lr_scale == 1);
        std::vector<double> expected = values(b[i]->data);
        if (hidden)
            for (double& x : expected) x *= 0.5;
        EXPECT(values(a[i]->data) == expected);
    }
}

TEST_CASE("coordinate check: with muP four steps change block outputs and logits alike at all widths, without it not") {
    const Text text;
    std::vector<Coordinates> with, without;
    for (const int64_t width : {64, 128, 256, 512}) {
        with.push_back(change(of_width(text, width, true)));
        without.push_back(change(of_width(text, width, false)));
        DOCTEST_MESSAGE("width " << width << ": block outputs change by " << with.back().hidden << " with muP, "
                                 << without.back().hidden << " without; logits by " << with.back().logits << ", "
                                 << without.back().logits);
    }
    for (const auto what : {&Coordinates::hidden, &Coordinates::logits}) {
        INFO(std::string(what == &Coordinates::logits ? "logits" : "block outputs"));
        for (const Coordinates& c : with) {
            EXPECT(c.*what / (with.front().*what) <= 2);
            EXPECT(c.*what / (with.front().*what) >= 0.5);
        }
        EXPECT(without.back().*what / (without.front().*what) >= 2.5);
    }
}

TEST_CASE("a model that was trained with muP and saved computes the same in Hugging Face's form, without muP") {
    const Text text;
    const Folder folder;
    TrainOptions o = of_width(text, 2 * kBase, true);
    o.save_hf = folder / "model";
    o.val_fraction = 0.1;
    Session trained(o);
    trained.run();
    TrainOptions plain = of_width(text, 2 * kBase, false);
    plain.val_fraction = 0.1;
    Session loaded(plain);
    HfWeights(o.save_hf, plain.model).load(loaded.model.params());
    const double expected = evaluate(trained.trainer);
    EXPECT(std::abs(evaluate(loaded.trainer) / expected - 1) <= 1e-6);
    EXPECT(expected < 5.4);  // it has learned something
}
