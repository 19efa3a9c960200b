// 08_3d_full/experts/minimal.cpp: experts on other ranks.
#define main experts_minimal_main
#include "08_3d_full/experts/minimal.cpp"
#undef main
#include "tests/device_comms.h"
#include "tests/minimal.h"

using namespace train70b;
using namespace train70b::test;

namespace {

std::unique_ptr<Session> complete_with_experts(minimal::Sizes s, int64_t steps = 4) {
    if (kEmulated) s.device = Device::cpu;
    TrainOptions o = options_of(s, steps);
    o.model.experts = {.count = 8, .top_k = 2, .ffn = s.F / 2};
    o.balance.aux_loss = 0;
    auto session = std::make_unique<Session>(o);
    session->run();
    return session;
}

void check_experts(Failures& failures, const minimal::Sizes& s, const Session& complete, const Comm& ranks) {
    minimal::sparse::Training training(s, ranks);
    const Comparison result = compare(training, complete, Whole{training.model});
    failures.expect(result.worst <= (s.dtype == DType::f64 ? 1e-10 : 5e-6),
                    fmt::format("{} ranks: {} at {}", ranks.size(), double(result.worst), result.worst.where));
    // Experts once, the rest on every rank.
    const double experts = double(s.layers * 8 * 3 * s.E * s.F / 2), all = double(complete.options.model.parameters());
    failures.expect(ranks.sum(result.elements) == experts + (all - experts) * ranks.size(), "elements left out");
}

}  // namespace

TEST_CASE("experts on 1, 2, 4 and 8 ranks: the complete program's losses, norms and gradients, to 1e-10") {
    if (kEmulated) return;
    const minimal::Sizes s = small_sizes();
    const auto whole_program = complete_with_experts(s);
    Failures failures;
    for (const int n : {1, 2, 4, 8})
        on_first_ranks(n, [&](const Comm& ranks) { check_experts(failures, s, *whole_program, ranks); });
    EXPECT_NONE(failures);
}

TEST_CASE("experts on a GPU, to 5e-6") {
    if (!has_gpu()) return;
    const minimal::Sizes s = small_sizes(Device::cuda);
    const auto whole_program = complete_with_experts(s, 1);  // later steps: a choice may differ in fp32
    Failures failures;
    const std::vector<Comm> comms = device_comms();
    for (size_t i = 0; i < comms.size(); ++i)
        if (const Comm& comm = comms[i]; comm.size() <= 2 && has_turn(int64_t(i), int64_t(comms.size())))
            check_experts(failures, s, *whole_program, comm);
    EXPECT_NONE(failures);
}
