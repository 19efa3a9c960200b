// Grades the lab zero3-unit.
#include "03_zero/complete/zero.h"
#include "tests/labs.h"
#include "tests/parallel.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// Four blocks, so that six units could be unsharded at the same time.
TrainOptions options(const Text& text) {
    TrainOptions o = odd(text, 8);
    o.model.layers = 4;
    o.model.hidden = 54;
    o.model.heads = 9;
    o.dtype = "fp64";
    o.steps = 2;
    o.eps = 1e-3;
    return o;
}
constexpr int64_t kUnits = 6;

struct Sharded {
    std::unique_ptr<Zero> zero;
    StepStats stats;
    Session session;

    Sharded(TrainOptions o, const ZeroOptions& options, int64_t micro_batches = 1,
            const std::function<void(Session&)>& inside = {})
        : stats(world()), session(divided(o, micro_batches), [&](Session& s) {
              if (inside) inside(s);
              zero = std::make_unique<Zero>(s.model, world(), options, AdamW::maker(s.options.adamw()));
              use_store(s.trainer, *zero, world());
              s.trainer.runtime = &stats;
          }) {}
    Sharded& run() {
        session.run();
        return *this;
    }
    static TrainOptions divided(TrainOptions o, int64_t micro_batches) {
        o.micro_batch = o.global_batch / world().size() / micro_batches;
        return o;
    }
    int64_t bytes(const std::string& operation) const {  // in the last step
        const auto found = stats.sent.find("world." + operation);
        return found == stats.sent.end() ? 0 : found->second.bytes;
    }
};

void expect_one_ranks_run(const std::vector<ZeroOptions>& list) {
    const Text text;
    const TrainOptions o = options(text);
    Session one(o);
    one.run();
    Failures failures;
    for (const ZeroOptions& options : list)
        for (const int64_t m : {1, 2}) {
            Sharded run(o, options, m);
            const Farthest deviation = deviation_on_rank_0(run.run().session, one);
            failures.expect(deviation <= 1e-10,
                            fmt::format("stage {}, prefetch {}, {} micro-batches: off by {:.2g} at {}", options.stage,
                                        options.prefetch, m, double(deviation), deviation.where));
        }
    EXPECT_NONE(failures);
}

// Reductions that this rank has started since the last call.
int64_t reductions() {
    const auto stats = world().take_stats().operations;
    const auto found = stats.find("world.reduce_scatter");
    return found == stats.end() ? 0 : found->second.calls;
}

}  // namespace

TEST_CASE("lab: one rank's run, stages 0 and 1") { expect_one_ranks_run({{.stage = 0}, {.stage = 1, .bucket_mb = 0}}); }

TEST_CASE("lab: one rank's run, stage 2") { expect_one_ranks_run({{.stage = 2}}); }

TEST_CASE("lab: one rank's run, stage 3") { expect_one_ranks_run({{.stage = 3}, {.stage = 3, .prefetch = 2}}); }

TEST_CASE("lab: how many units are unsharded") {
    const Text text;
    for (const int64_t prefetch : {0, 1}) {
        Sharded run(options(text), {.stage = 3, .prefetch = prefetch});
        const int64_t got = run.run().zero->most_unsharded();
        figure(fmt::format("units unsharded at once, --prefetch {}", prefetch), got, prefetch + 1, "", "prefetch + 1",
               got == kUnits ? "All units stay unsharded between the passes: memory as in stage 2."
               : got == prefetch + 2 || got > prefetch + 1
                   ? "Units are gathered that nothing uses: prefetched in the wrong direction?"
                   : "");
    }
}

TEST_CASE("lab: what a step sends") {
    const Text text;
    for (const int64_t m : {1, 2}) {
        Sharded run(options(text), {.stage = 3}, m);
        const int64_t gathered = run.run().bytes("all_gather"), reduced = run.bytes("reduce_scatter");
        const int64_t N = world().size(), P = 8 * run.zero->padded_elements(), once = m * P * (N - 1) / N;
        figure(fmt::format("all-gathers, {} micro-batches", m), gathered, 2 * once, "B", "2 m P (N-1)/N",
               gathered <= once
                   ? "Gathered once: the units stay unsharded between the passes (reshard_after_forward=False)."
               : gathered > 2 * once ? "Units are gathered that nothing uses: prefetched in the wrong direction?"
                                     : "");
        figure("reduce-scatters", reduced, once, "B", "m G (N-1)/N");
    }
}

TEST_CASE("lab: when gradients are reduced") {
    // Inside the wrapper, before the unit's own reduction: how many have been started by then.
    const Text text;
    TrainOptions o = options(text);
    o.steps = 1;
    std::vector<int64_t> started;
    int64_t sum = 0;
    Sharded run(o, {.stage = 1, .bucket_mb = 0}, 1, [&](Session& s) {
        for (Unit* unit : s.model.units())
            unit->wrappers.push_back([&](Tape& tape, const Var& x, const Unit::Body& body) {
                tape.record([&] { started.push_back(sum += reductions()); });
                return body(tape, x);
            });
    });
    run.run();
    REQUIRE(started.size() == kUnits);
    figure("reductions started before the first block's own", started[kUnits - 2], kUnits - 2, "",
           "the units behind it",
           started[kUnits - 2] > kUnits - 2
               ? "It is sent before its own backward pass: what is recorded before the body runs after it."
               : "Each unit's leave when it is ready.");
}

TEST_CASE("lab: weight gradients that are deferred") {
    const Text text;
    TrainOptions o = options(text);
    Sharded run(o, {.stage = 1, .bucket_mb = 0});
    Trainer& trainer = run.session.trainer;
    trainer.start();
    trainer.store->begin_step(1);
    trainer.batches.begin_step(*trainer.groups.dp, *trainer.groups.dp_cp, 1);
    Tape::Steps later;
    Tape tape;
    tape.deferred_wgrads = &later;
    run.session.model.forward(tape, trainer.micro_batch(1, 0));
    reductions();
    tape.backward();
    figure("units reduced before their weight gradients are computed", reductions(), int64_t(0), "", "none",
           "They are reduced before their weight gradients are complete: unit_ready depends on them.");
    for (auto& step : later) step();
    figure("and after", reductions(), kUnits, "", "one for each unit");
    trainer.store->finish_gradients();
}
