// 03_zero/minimal.cpp: the three stages.
#define main minimal_main
#include "03_zero/minimal.cpp"
#undef main
#include "tests/minimal_ranks.h"

using namespace train70b;
using namespace train70b::test;

namespace {
struct OwnShard {
    const minimal::Training& training;
    std::pair<Tensor, int64_t> operator()(size_t unit) const {
        const Tensor& grad = training.shards[unit].grad;
        return {grad, training.ranks.rank() * grad.size()};
    }
};

void check(Failures& failures, const minimal::Sizes& s, const Session& complete, int stage, const Comm& ranks) {
    const MemoryBytes before = ledger().now();
    minimal::Training training(s, stage, ranks);
    const Comparison result = compare(training, complete, OwnShard{training});
    expect_equal(failures, result, s.dtype, fmt::format("stage {} on {} ranks", stage, ranks.size()));
    failures.expect(ranks.sum(result.elements) == double(options_of(s, 1).model.parameters()), "elements left out");
    // What stays between steps, on N ranks: all, or an N-th (up to padding) of it.
    const double all = double(options_of(s, 1).model.parameters() * size_of(s.dtype));
    const auto is_nth = [&](Memory kind, double of, bool sharded) {
        const double bytes = double(ledger().now()[size_t(kind)] - before[size_t(kind)]);
        failures.expect(std::abs(bytes - of / (sharded ? ranks.size() : 1)) < 1000,
                        fmt::format("stage {} on {} ranks: {} bytes of {} {}", stage, ranks.size(), bytes, of,
                                    kMemoryNames[size_t(kind)]));
    };
    is_nth(Memory::params, all, stage == 3);
    is_nth(Memory::grads, all, stage >= 2);
    is_nth(Memory::optimizer, 2 * all, true);
    // In a step, on top of that, no more than one unit's.
    int64_t largest = 0;
    for (const minimal::Unit& unit : training.model.units)
        largest = std::max(largest, (total_size(unit.params) + ranks.size()) * size_of(s.dtype));
    const MemoryBytes held = ledger().now();
    ledger().reset_peak();
    training.step(int64_t(complete.reports.size()) + 1);
    for (const Memory kind : {Memory::params, Memory::grads})
        failures.expect(ledger().peak().kind[size_t(kind)] <= held[size_t(kind)] + largest,
                        fmt::format("stage {} on {} ranks: more than a unit of {}", stage, ranks.size(),
                                    kMemoryNames[size_t(kind)]));
}
}  // namespace

TEST_CASE("stages 1 to 3 on 1, 2, 4 and 8 ranks: the complete program's numbers to 1e-10, and an N-th of the memory") {
    if (kEmulated) return;
    const minimal::Sizes s = small_sizes();
    const auto whole_program = complete(s);
    on_ranks({1, 2, 4, 8}, [&](Failures& failures, const Comm& ranks) {
        for (int stage = 1; stage <= 3; ++stage) check(failures, s, *whole_program, stage, ranks);
    });
}

TEST_CASE("on a GPU, to 5e-6") {
    if (!has_gpu()) return;
    const minimal::Sizes s = small_sizes(Device::cuda);
    const auto whole_program = complete(s, 2);
    on_gpus(3, [&](Failures& failures, int64_t variant, const Comm& ranks) {
        if (ranks.size() <= s.batch) check(failures, s, *whole_program, int(1 + variant), ranks);
    });
}
