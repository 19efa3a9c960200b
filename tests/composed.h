#pragma once
// A small training run in a layout of chapter 08.
#include "08_3d_full/complete/compose.h"
#include "tests/parallel.h"

namespace train70b::test {

struct ComposedRun {
    ParallelConfig config;
    std::unique_ptr<Composed> composed;
    Session session;

    // Usage error where the plan is not one for these options and ranks.
    ComposedRun(const TrainOptions& o, const Comm& ranks, const ParallelConfig& asked)
        : config(validated(asked, o, ranks)),
          session(
              o, [&](Session& s) { composed = std::make_unique<Composed>(s.model, s.trainer, o, config, ranks); },
              stage_of(config, o.model, ranks.rank())) {}
    static ParallelConfig validated(ParallelConfig config, const TrainOptions& o, const Comm& ranks) {
        validate(config, o, ranks.size());
        return config;
    }
};

}  // namespace train70b::test
