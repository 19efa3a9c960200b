#pragma once
// A small training run in a layout of chapter 08.
#include "08_3d_full/complete/compose.h"
#include "08_3d_full/plan/dry_run.h"
#include "tests/parallel.h"

namespace train70b::test {

struct ComposedRun {
    const MemoryBytes before = ledger().now();
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
    // Whether this rank has booked what the formulas of its memory say, to the byte.
    bool books_its_formulas() const {
        const RankMemory formula = rank_formula(session.options, config, world().rank());
        const MemoryBytes peak = session.trainer.peak().above(before).kind;
        bool good = true;
        for (const auto& [kind, bytes] : {std::pair(Memory::params, formula.params),
                                          {Memory::grads, formula.grads},
                                          {Memory::optimizer, formula.optimizer},
                                          {Memory::host, formula.host},
                                          {Memory::disk, formula.disk}}) {
            if (peak[size_t(kind)] == bytes) continue;
            fmt::print(stderr, "rank {}: {} bytes of {}, by formula {}\n", this_rank, peak[size_t(kind)],
                       kMemoryNames[size_t(kind)], bytes);
            good = false;
        }
        return good;
    }
};

}  // namespace train70b::test
