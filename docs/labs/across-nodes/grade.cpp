// Grades the lab across-nodes.
#include "02_data_parallel/complete/across_nodes.h"
#include "tests/collectives.h"
#include "tests/counting.h"
#include "tests/labs.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// On 3 nodes of 2 ranks and on 2 of 3; a sum tells whose it is. The first wrong one ends the test: others could hang.
void expect_sums(int64_t size, void (*body)(Backend&, const Tensor&)) {
    for (const int64_t L : {2, 3}) {
        const auto group = make_mpi_backend();
        group->ranks_per_node = L;
        const Tensor x = numbers(DType::f32, size, [](int64_t i) { return (i + 1) << this_rank; });
        body(*group, x);
        const std::string wrong = difference(x, [&](int64_t i) { return (i + 1) * ((1 << group->size()) - 1); });
        Failures failures;
        failures.expect(wrong.empty(), fmt::format("{} ranks per node, {} elements: {}", L, size, wrong));
        const std::string of_all_ranks = failures.of_all_ranks();
        DOCTEST_REQUIRE_MESSAGE(of_all_ranks.empty(), of_all_ranks);
    }
}

}  // namespace

TEST_CASE("lab: sums of the all-reduce") {
    for (const int64_t size : {30, 31, 4}) expect_sums(size, hierarchical_all_reduce);
}

TEST_CASE("lab: sums of each half with the other one of a flat ring") {
    expect_sums(30, [](Backend& g, const Tensor& x) { hierarchical_reduce_scatter(g, x), ring_all_gather(g, x); });
    expect_sums(30, [](Backend& g, const Tensor& x) { ring_reduce_scatter(g, x), hierarchical_all_gather(g, x); });
}

TEST_CASE("lab: bytes of a rank to other nodes and inside its own") {
    const auto backend = make_mpi_backend();
    const int64_t N = world().size(), L = 2, M = N / L, n = 4 * 500 * N;
    backend->ranks_per_node = L;
    const auto measure = [&](const std::string& what, void (*body)(Backend&, const Tensor&), int64_t halves) {
        Counting counting(*backend);
        body(counting, numbers(DType::f32, n / 4, [](int64_t) { return 1; }));
        const auto most = [](int64_t bytes) { return int64_t(world().max(double(bytes))); };
        const std::string times = halves == 2 ? "2 " : "";
        figure(what + ", bytes of a rank to other nodes", most(counting.crossed(L)), halves * n / L * (M - 1) / M, "B",
               times + "n/L (M-1)/M");
        figure(what + ", inside its node", most(counting.sent - counting.crossed(L)), halves * n * (L - 1) / L, "B",
               times + "n (L-1)/L");
    };
    measure("all-reduce", hierarchical_all_reduce, 2);
    measure("reduce-scatter", hierarchical_reduce_scatter, 1);
    measure("all-gather", hierarchical_all_gather, 1);
}
