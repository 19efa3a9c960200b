// 05_pipeline/minimal.cpp: 1F1B as a list, and the loop that executes it.
#define main minimal_main
#include "05_pipeline/minimal.cpp"
#undef main
#include "05_pipeline/complete/schedule.h"
#include "tests/minimal_ranks.h"

using namespace train70b;
using namespace train70b::test;

namespace {
void check(Failures& failures, const minimal::Sizes& s, const Session& complete, const Comm& ranks) {
    minimal::Training training(s, ranks);
    const Comparison result = compare(training, complete, Whole{training.model});
    expect_equal(failures, result, s.dtype, fmt::format("{} ranks", ranks.size()));
    failures.expect(ranks.sum(result.elements) == double(options_of(s, 1).model.parameters()), "elements left out");
}
}  // namespace

TEST_CASE("the list is the complete program's 1f1b") {
    for (const int64_t p : {1, 2, 3, 4, 8})
        for (const int64_t m : {1, 2, 5, 8, 16}) {
            const Schedule schedule = make_schedule("1f1b", p, m);
            for (int64_t rank = 0; rank < p; ++rank) {
                std::string mine, complete;
                for (const minimal::Step& step : minimal::one_f_one_b(p, rank, m))
                    mine += fmt::format("{}{} ", step.pass, step.micro_batch);
                for (const train70b::Step& step : schedule.ranks[size_t(rank)])
                    complete += train70b::to_string(step) + " ";
                EXPECT(mine == complete);
            }
        }
}

TEST_CASE("1, 2 and 4 stages: the complete program's losses, norms and gradients, to 1e-10") {
    if (kEmulated) return;
    const minimal::Sizes s = small_sizes(Device::cpu, 4);
    const auto whole_program = complete(s);
    on_ranks({1, 2, 4}, [&](Failures& failures, const Comm& ranks) { check(failures, s, *whole_program, ranks); });
}

TEST_CASE("on a GPU, to 5e-6") {
    if (!has_gpu()) return;
    const minimal::Sizes s = small_sizes(Device::cuda);
    const auto whole_program = complete(s, 2);
    on_gpus(1, [&](Failures& failures, int64_t, const Comm& ranks) {
        if (ranks.size() <= s.layers) check(failures, s, *whole_program, ranks);
    });
}
