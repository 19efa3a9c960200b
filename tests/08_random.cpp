// Layouts that nobody chose: models, meshes and techniques drawn at random, each held to one rank in fp64 over 20
// steps. tests/run.sh --all runs all of them, a commit an eighth over 6 steps.
#include "tests/composed.h"
#include "tests/drawn_layouts.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr int kRandomLayouts = 50;

}  // namespace

TEST_CASE("random layouts in fp64: every one is one rank's run, losses and norms of 20 steps or 6, to 1e-10") {
    const Text text;
    REQUIRE(world().size() == 16);
    double worst = 0;
    std::string farthest;
    int64_t count = 0, refused = 0;
    for (int64_t number = 0; number < kRandomLayouts; ++number) {
        if (!in_slice(number) || (!kThorough && number % 16 >= 8)) continue;
        // A draw that makes no run is refused by every rank alike; then comes the next.
        std::unique_ptr<ComposedRun> run;
        Drawn drawn;
        for (uint64_t attempt = 0; !run; ++attempt) {
            REQUIRE(attempt < 200);
            drawn = draw(text, world().size(), uint64_t(number), attempt);
            if (kThorough && !all_slices()) drawn.options.steps = 6;
            try {
                check_config(drawn.options.model);
                run = std::make_unique<ComposedRun>(drawn.options, world(), drawn.config);
            } catch (const UsageError&) { ++refused; }
        }
        run->session.run();
        TrainOptions whole = drawn.options;
        whole.loss_chunk = 0;
        const auto one = run_on_one_rank(whole);
        const Farthest deviation = one ? worst_deviation(run->session, *one) : Farthest();
        INFO(drawn.text(), ": ", deviation);
        EXPECT_EVERYWHERE(deviation <= 1e-10);
        if (!(deviation <= worst)) worst = deviation, farthest = drawn.text();
        ++count;
    }
    if (world().rank() == 0)
        fmt::print("{} random layouts ({} draws refused), the farthest by {:.1e}: {}\n", count, refused, worst,
                   farthest);
    EXPECT(count > 0);
}

TEST_CASE("latent attention and a further token over tp, cp, dp and pp in fp64: one rank's run, on every commit") {
    const Text text;
    for (const bool sequence : {true, false}) {
        TrainOptions o = tiny(text);
        o.dtype = "fp64";
        o.steps = 2;
        o.micro_batch = 1;
        o.model.kv_heads = o.model.heads;
        o.model.latent = {.kv_rank = 8, .q_rank = sequence ? 6 : 0, .rope_dim = 2};
        o.model.multi_token = true;
        ParallelConfig config{.mesh = {.tp = 2, .cp = 2, .dp = 2, .pp = 2}};
        config.zero.stage = sequence ? 3 : 1;
        config.tensor.sequence_parallel = sequence;
        ComposedRun run(o, world(), config);
        run.session.run();
        const auto one = run_on_one_rank(o);
        const Farthest deviation = one ? worst_deviation(run.session, *one) : Farthest();
        INFO("sequence parallel " << sequence << ": " << deviation);
        EXPECT_EVERYWHERE(deviation <= 1e-10);
    }
}
