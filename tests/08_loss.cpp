// What is added to the loss and measured of the gradients, in layouts that mix the techniques: z-loss and muP as on one
// rank, the gradient noise scale as in every other layout with the same micro-batches.
#include "08_3d_full/watch/noise_scale.h"
#include "tests/composed.h"
#include "tests/grid_layouts.h"

using namespace train70b;
using namespace train70b::test;

namespace {

TrainOptions loss_shape(const Text& text) {
    TrainOptions o =
        of_model(tiny(text), {.layers = 4, .hidden = 32, .heads = 4, .kv_heads = 2, .ffn = 48, .vocab = 131}, 16, 8);
    o.dtype = "fp64";
    o.micro_batch = 1;
    return o;
}

struct NoisyLayout {
    StepStats stats;
    std::optional<NoiseScale> noise;
    ParallelConfig config;
    std::unique_ptr<Composed> composed;
    Session session;
    NoisyLayout(const TrainOptions& o, const Comm& ranks, const GridLayout& layout, bool measure)
        : stats(ranks),
          config(ComposedRun::validated(layout.config(), o, ranks)),
          session(
              o,
              [&](Session& s) {
                  if (measure) s.trainer.controls.push_back(&noise.emplace(s.trainer));
                  composed = std::make_unique<Composed>(s.model, s.trainer, o, config, ranks);
                  s.trainer.runtime = &stats;
              },
              stage_of(config, o.model, ranks.rank())) {
        session.run();
    }
};

}  // namespace

TEST_CASE("z-loss and muP: losses, norms, gradients of every layout are one rank's to 1e-10") {
    const Text text;
    TrainOptions o = loss_shape(text);
    o.z_loss = 0.03;
    o.mup = 8;
    std::map<std::string, std::unique_ptr<Session>> ones;
    int64_t number = 0;
    for (const GridLayout& layout : std::vector<GridLayout>{
             {.mesh = {.dp = 8}},
             {.mesh = {.tp = 4, .dp = 2}, .zero = 1, .sequence = true, .recompute = "full"},
             {.mesh = {.tp = 2, .dp = 2, .pp = 2},
             .pipeline = "zero-bubble",
             .zero = 3,
             .sequence = true,
             .overlap = true},
             {.mesh = {.tp = 2, .cp = 2, .pp = 2}, .pipeline = "interleaved", .zero = 2},
             {.mesh = {.cp = 4, .dp = 2}, .zero = 3, .offload = Offload::all},
             {.mesh = {.dp = 2, .pp = 4}, .pipeline = "gpipe", .zero = 1, .offload = Offload::optimizer}}) {
        if (!in_half(number++)) continue;
        o.recompute = layout.recompute;
        if (!ones.contains(layout.recompute)) ones[layout.recompute] = run_on_one_rank(o);
        ComposedRun run(o, world(), layout.config());
        run.session.run();
        Farthest deviation;
        if (const Session* one = ones[layout.recompute].get()) {
            deviation = worst_deviation(run.session, *one);
            for (size_t i = 0; i < one->reports.size(); ++i) {
                const std::optional<double> mine = run.session.reports[i].z_loss, its = one->reports[i].z_loss;
                deviation.add(mine && its && *its > 0 ? std::abs(*mine / *its - 1) : NAN,
                              fmt::format("step {}, z-loss", i + 1));
            }
        }
        INFO(layout.text(), ": ", deviation);
        EXPECT_EVERYWHERE(deviation <= 1e-10);
    }
    // They do something: the loss of step 1 is that of other logits, the gradient that of another loss.
    TrainOptions plain = loss_shape(text);
    const auto without = run_on_one_rank(plain);
    plain.z_loss = 0.03;
    const auto with_z = run_on_one_rank(plain);
    if (without) {
        const StepReport &a = without->reports.front(), &b = with_z->reports.front();
        const StepReport& c = ones.begin()->second->reports.front();
        EXPECT(b.loss == a.loss);  // the cross-entropy alone
        EXPECT(std::abs(b.grad_norm / a.grad_norm - 1) > 1e-3);
        EXPECT(std::abs(c.loss / a.loss - 1) > 1e-3);
        EXPECT(!a.z_loss);
    }
}

TEST_CASE("--skip-step: a spike of every layout is skipped as one rank's; losses and norms of all steps to 1e-10") {
    const Text text;
    TrainOptions o = loss_shape(text);
    o.steps = 6;
    o.skip_step = true;
    const auto prepare = [](Session& s) {  // as after 64 updates
        StepState* state = s.trainer.step_states.front();
        StepState::Rows rows = state->rows();
        for (size_t i = 0; i < rows.values.size(); ++i)
            rows.values[i] = i == 0 ? 64 : i == size_t(rows.width) ? 0 : 3 + float(i % 2) * 4;
        state->restore(rows);
    };
    std::unique_ptr<SpikeAt> spike;
    const auto one = run_on_one_rank(o, [&](Session& s) {
        prepare(s);
        spike = std::make_unique<SpikeAt>(s.trainer, 3);
    });
    int64_t number = 0;
    for (const GridLayout& layout : std::vector<GridLayout>{
             {.mesh = {.dp = 8}},
             {.mesh = {.tp = 2, .dp = 2, .pp = 2}, .pipeline = "zero-bubble", .zero = 2, .sequence = true},
             {.mesh = {.cp = 2, .dp = 2, .pp = 2}, .pipeline = "interleaved", .zero = 3},
             {.mesh = {.tp = 2, .dp = 4}, .zero = 3, .offload = Offload::all}}) {
        if (!in_half(number++)) continue;
        ComposedRun run(o, world(), layout.config());
        prepare(run.session);
        const SpikeAt again(run.session.trainer, 3);
        std::vector<std::vector<double>> weights;
        run.session.on_step = [&](const StepReport& report) {
            weights.push_back(gathered(run.session, Which::data));
            EXPECT_EVERYWHERE(report.skipped == (report.step == 3));
        };
        run.session.run();
        const Farthest deviation = deviation_on_rank_0(run.session, one);
        INFO(layout.text(), ": ", deviation);
        EXPECT_EVERYWHERE(deviation <= 1e-10);
        EXPECT_EVERYWHERE(on_rank_0(weights[2] == weights[1] && weights[3] != weights[2]));
    }
}

TEST_CASE("the noise scale is the same in all layouts with the same micro-batches, and changes no other number") {
    const Text text;
    TrainOptions o = loss_shape(text);
    o.micro_batch = 2;
    o.model.kv_heads = 4;
    Failures failures;
    int64_t number = 0;
    for (const std::vector<GridLayout>& layouts : std::vector<std::vector<GridLayout>>{
             {{.mesh = {.tp = 4, .dp = 2}},
              {.mesh = {.tp = 4, .dp = 2}, .zero = 3, .sequence = true, .overlap = true},
              {.mesh = {.tp = 2, .dp = 2, .pp = 2}, .pipeline = "interleaved", .zero = 3, .sequence = true},
              {.mesh = {.tp = 2, .dp = 2, .pp = 2}, .zero = 1, .recompute = "full", .offload = Offload::optimizer},
              {.mesh = {.dp = 2, .pp = 4}, .pipeline = "gpipe", .zero = 1},
              {.mesh = {.dp = 2, .pp = 4}, .pipeline = "zero-bubble", .zero = 2}},
             {{.mesh = {.tp = 2, .dp = 4}, .zero = 1},
              {.mesh = {.tp = 2, .dp = 4}, .zero = 3, .hybrid_shard = 2},
              {.mesh = {.dp = 4, .pp = 2}, .pipeline = "zero-bubble", .zero = 3, .recompute = "full"}}}) {
        std::vector<double> expected;
        for (const GridLayout& layout : layouts) {
            if (!expected.empty() && !in_half(number++)) continue;  // the first is what the others are compared with
            o.recompute = layout.recompute;
            NoisyLayout plain(o, world(), layout, false), run(o, world(), layout, true);
            const auto expect = [&](bool good, const std::string& what) {
                failures.expect(good, layout.text() + ": " + what);
            };
            expect(run.session.history() == plain.session.history(), "other losses or norms");
            std::vector<double> scales;
            for (const StepReport& report : run.session.reports) scales.push_back(report.noise_scale.value_or(NAN));
            expect(scales[0] > 0, fmt::format("step 1: {} tokens", scales[0]));
            if (expected.empty()) expected = scales;
            for (size_t i = 0; i < scales.size(); ++i)
                expect(
                    std::abs(scales[i] / expected[i] - 1) <= 1e-6 || (std::isnan(scales[i]) && std::isnan(expected[i])),
                    fmt::format("step {}: {} tokens, not {}", i + 1, scales[i], expected[i]));
            int64_t calls = 0;
            for (const auto& [name, entry] : run.stats.sent) calls += entry.calls;
            for (const auto& [name, entry] : plain.stats.sent) {
                calls -= entry.calls;
                if (!name.ends_with(".scalar"))
                    expect(run.stats.sent.at(name).bytes == entry.bytes, "other bytes of " + name);
            }
            expect(calls == 0, fmt::format("{} more messages", calls));
        }
    }
    EXPECT_NONE(failures);
}

TEST_CASE("where a layout has no gradient of a small batch, there is no noise scale") {
    const Text text;
    TrainOptions o = loss_shape(text);
    o.micro_batch = 2;
    for (const GridLayout& layout :
         std::vector<GridLayout>{{.mesh = {.cp = 2, .dp = 4}}, {.mesh = {.tp = 4, .dp = 2}}}) {
        const NoisyLayout run(o, world(), layout, true);
        INFO(layout.text());
        for (const StepReport& report : run.session.reports) EXPECT_EVERYWHERE(!report.noise_scale);
    }
}
