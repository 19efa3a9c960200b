// 06_context_parallel/minimal.cpp: ring attention, in order and zigzag.
#define main minimal_main
#include "06_context_parallel/minimal.cpp"
#undef main
#include "tests/device_comms.h"
#include "tests/minimal.h"

using namespace train70b;
using namespace train70b::test;

namespace {
void check(Failures& failures, const minimal::Sizes& s, const Session& complete, int64_t chunks, const Comm& ranks) {
    minimal::Training training(s, ranks, chunks);
    const Comparison result = compare(training, complete, Whole{training.model});
    failures.expect(
        result.worst <= (s.dtype == DType::f64 ? 1e-10 : 5e-6),
        fmt::format("{} ranks, {} chunks: {} at {}", ranks.size(), chunks, double(result.worst), result.worst.where));
    failures.expect(result.elements == double(options_of(s, 1).model.parameters()), "elements left out");
}
}  // namespace

TEST_CASE("ring and zigzag on 1, 2, 4 and 8 ranks: the complete program's losses, norms and gradients, to 1e-10") {
    if (kEmulated) return;
    const minimal::Sizes s = small_sizes();
    const auto whole_program = complete(s);
    Failures failures;
    for (const int n : {1, 2, 4, 8})
        on_first_ranks(n, [&](const Comm& ranks) {
            for (const int64_t chunks : {1, 2}) check(failures, s, *whole_program, chunks, ranks);
        });
    EXPECT_NONE(failures);
}

TEST_CASE("on a GPU, to 5e-6") {
    if (!has_gpu()) return;
    const minimal::Sizes s = small_sizes(Device::cuda);
    const auto whole_program = complete(s, 2);
    Failures failures;
    const std::vector<Comm> comms = device_comms();
    const int64_t variants = 2 * int64_t(comms.size());
    for (int64_t i = 0; i < variants; ++i)
        if (has_turn(i, variants)) check(failures, s, *whole_program, 1 + i % 2, comms[size_t(i / 2)]);
    EXPECT_NONE(failures);
}
