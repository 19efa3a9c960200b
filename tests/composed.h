#pragma once
// A small training run in a layout of chapter 08.
#include "08_3d_full/compose.h"
#include "tests/ranks.h"
#include "tests/training.h"

namespace train70b::test {

struct ComposedRun {
    Plan plan;
    std::unique_ptr<Composed> composed;
    Session session;

    // Usage error where the plan is not one for these options and ranks.
    ComposedRun(const TrainOptions& o, const Comm& ranks, const Plan& asked)
        : plan(settled(asked, o, ranks)),
          session(
              o, [&](Session& s) { composed = std::make_unique<Composed>(s.model, s.trainer, o, plan, ranks); },
              stage_of(plan, o.model, ranks.rank())) {}
    static Plan settled(Plan plan, const TrainOptions& o, const Comm& ranks) {
        settle(plan, o, ranks.size());
        return plan;
    }
};

// The same on one rank, run; empty on all ranks but 0.
inline std::unique_ptr<Session> run_on_one_rank(TrainOptions o) {
    std::unique_ptr<Session> one;
    o.micro_batch = o.global_batch;
    only_on_rank_0([&] {
        one = std::make_unique<Session>(o);
        one->run();
        one->leave();
    });
    DOCTEST_REQUIRE((one != nullptr) == (this_rank == 0));
    return one;
}

}  // namespace train70b::test
