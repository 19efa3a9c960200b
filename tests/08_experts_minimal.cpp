// 08_3d_full/experts/minimal.cpp: experts on other ranks.
#define main experts_minimal_main
#include "08_3d_full/experts/minimal.cpp"
#undef main
#include "tests/minimal_ranks.h"

using namespace train70b;
using namespace train70b::test;

namespace {

std::unique_ptr<Session> complete_with_experts(minimal::Sizes s, int64_t steps = 4) {
    if (kEmulated) s.device = Device::cpu;
    TrainOptions o = options_of(s, steps);
    o.model.experts = {.count = 8, .top_k = 2, .ffn = s.F / 2};
    o.model.experts.balance.aux_loss = 0;
    auto session = std::make_unique<Session>(o);
    session->run();
    return session;
}

void check_experts(Failures& failures, const minimal::Sizes& s, const Session& complete, const Comm& ranks) {
    minimal::sparse::Training training(s, ranks);
    const Comparison result = compare(training, complete, Whole{training.model});
    expect_equal(failures, result, s.dtype, fmt::format("{} ranks", ranks.size()));
    // Experts once, the rest on every rank.
    const double experts = double(s.layers * 8 * 3 * s.E * s.F / 2), all = double(complete.options.model.parameters());
    failures.expect(ranks.sum(result.elements) == experts + (all - experts) * ranks.size(), "elements left out");
}

}  // namespace

TEST_CASE("experts on 1, 2, 4 and 8 ranks: the complete program's losses, norms and gradients, to 1e-10") {
    if (kEmulated) return;
    const minimal::Sizes s = small_sizes();
    const auto whole_program = complete_with_experts(s);
    on_ranks({1, 2, 4, 8},
             [&](Failures& failures, const Comm& ranks) { check_experts(failures, s, *whole_program, ranks); });
}

TEST_CASE("experts on a GPU, to 5e-6") {
    if (!has_gpu()) return;
    const minimal::Sizes s = small_sizes(Device::cuda);
    const auto whole_program = complete_with_experts(s, 1);  // later steps: a choice may differ in fp32
    on_gpus(1, [&](Failures& failures, int64_t, const Comm& ranks) {
        if (ranks.size() <= 2) check_experts(failures, s, *whole_program, ranks);
    });
}
