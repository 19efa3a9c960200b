// 04_tensor_parallel/minimal.cpp: matrices cut over the ranks.
#define main minimal_main
#include "04_tensor_parallel/minimal.cpp"
#undef main
#include "tests/minimal_ranks.h"

using namespace train70b;
using namespace train70b::test;

namespace {
void check(Failures& failures, const minimal::Sizes& s, const Session& complete, const Comm& ranks) {
    minimal::Training training(s, ranks);
    const Comparison result = compare(training, complete, Whole{training.model});
    expect_equal(failures, result, s.dtype, fmt::format("{} ranks", ranks.size()));
    const LlamaConfig c = options_of(s, 1).model;  // norms are on every rank
    const double vectors = double(c.layers * c.block_vectors() + c.hidden), all = double(c.parameters());
    failures.expect(ranks.sum(result.elements) == all + vectors * (ranks.size() - 1), "elements left out");
}
}  // namespace

TEST_CASE("1, 2 and 4 ranks: the complete program's losses, norms and gradients, to 1e-10") {
    if (kEmulated) return;
    const minimal::Sizes s = small_sizes();
    const auto whole_program = complete(s);
    on_ranks({1, 2, 4}, [&](Failures& failures, const Comm& ranks) { check(failures, s, *whole_program, ranks); });
}

TEST_CASE("on a GPU, to 5e-6") {
    if (!has_gpu()) return;
    const minimal::Sizes s = small_sizes(Device::cuda);
    const auto whole_program = complete(s, 2);
    on_gpus(1, [&](Failures& failures, int64_t, const Comm& ranks) {
        if (ranks.size() <= 4) check(failures, s, *whole_program, ranks);
    });
}
