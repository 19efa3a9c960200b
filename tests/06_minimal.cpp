// 06_context_parallel/minimal.cpp: ring attention, in order and zigzag.
#define main minimal_main
#include "06_context_parallel/minimal.cpp"
#undef main
#include "tests/minimal_ranks.h"

using namespace train70b;
using namespace train70b::test;

namespace {
void check(Failures& failures, const minimal::Sizes& s, const Session& complete, int64_t chunks, const Comm& ranks) {
    minimal::Training training(s, ranks, chunks);
    const Comparison result = compare(training, complete, Whole{training.model});
    expect_equal(failures, result, s.dtype, fmt::format("{} ranks, {} chunks", ranks.size(), chunks));
    failures.expect(result.elements == double(options_of(s, 1).model.parameters()), "elements left out");
}
}  // namespace

TEST_CASE("ring and zigzag on 1, 2, 4 and 8 ranks: the complete program's losses, norms and gradients, to 1e-10") {
    if (kEmulated) return;
    const minimal::Sizes s = small_sizes();
    const auto whole_program = complete(s);
    on_ranks({1, 2, 4, 8}, [&](Failures& failures, const Comm& ranks) {
        for (const int64_t chunks : {1, 2}) check(failures, s, *whole_program, chunks, ranks);
    });
}

TEST_CASE("on a GPU, to 5e-6") {
    if (!has_gpu()) return;
    const minimal::Sizes s = small_sizes(Device::cuda);
    const auto whole_program = complete(s, 2);
    on_gpus(2, [&](Failures& failures, int64_t variant, const Comm& ranks) {
        check(failures, s, *whole_program, 1 + variant, ranks);
    });
}
