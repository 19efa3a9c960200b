// 04_tensor_parallel/minimal.cpp: matrices cut over the ranks.
#define main minimal_main
#include "04_tensor_parallel/minimal.cpp"
#undef main
#include "tests/device_comms.h"
#include "tests/minimal.h"

using namespace train70b;
using namespace train70b::test;

namespace {
void check(Failures& failures, const minimal::Sizes& s, const Session& complete, const Comm& ranks) {
    minimal::Training training(s, ranks);
    const Comparison result = compare(training, complete, Whole{training.model});
    failures.expect(result.worst <= (s.dtype == DType::f64 ? 1e-10 : 5e-6),
                    fmt::format("{} ranks: {} at {}", ranks.size(), double(result.worst), result.worst.where));
    const LlamaConfig c = options_of(s, 1).model;  // norms are on every rank
    const double vectors = double(c.layers * c.block_vectors() + c.hidden), all = double(c.parameters());
    failures.expect(ranks.sum(result.elements) == all + vectors * (ranks.size() - 1), "elements left out");
}
}  // namespace

TEST_CASE("1, 2 and 4 ranks: the complete program's losses, norms and gradients, to 1e-10") {
    if (kEmulated) return;
    const minimal::Sizes s = small_sizes();
    const auto whole_program = complete(s);
    Failures failures;
    for (const int n : {1, 2, 4})
        on_first_ranks(n, [&](const Comm& ranks) { check(failures, s, *whole_program, ranks); });
    EXPECT_NONE(failures);
}

TEST_CASE("on a GPU, to 5e-6") {
    if (!has_gpu()) return;
    const minimal::Sizes s = small_sizes(Device::cuda);
    const auto whole_program = complete(s, 2);
    Failures failures;
    const std::vector<Comm> comms = device_comms();
    for (size_t i = 0; i < comms.size(); ++i)
        if (const Comm& comm = comms[i]; comm.size() <= 4 && has_turn(int64_t(i), int64_t(comms.size())))
            check(failures, s, *whole_program, comm);
    EXPECT_NONE(failures);
}
