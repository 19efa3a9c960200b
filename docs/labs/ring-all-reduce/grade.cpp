// Grades the lab ring-all-reduce.
#include "01_single_gpu/core/memory.h"
#include "02_data_parallel/complete/all_reduce.h"
#include "tests/collectives.h"
#include "tests/counting.h"
#include "tests/labs.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("lab: after the reduce-scatter segment r is the sum on rank r") {
    const auto backend = make_mpi_backend();
    const int N = world().size(), r = world().rank();
    for (const int64_t size : {int64_t(4 * N), int64_t(4 * N + 3), int64_t(N - 1)}) {
        Tensor x = numbers(DType::f32, size, [&](int64_t i) { return element(r, i); });
        ring_reduce_scatter(*backend, x);
        const int64_t begin = size * r / N, end = size * (r + 1) / N;
        const std::string wrong =
            difference(x.element_slice(begin, {end - begin}), [&](int64_t i) { return sum_of(N, begin + i); });
        Failures failures;
        failures.expect(wrong.empty(), fmt::format("{} elements: of segment {}, {}", size, r, wrong));
        EXPECT_NONE(failures);
    }
}

TEST_CASE("lab: what a rank sends") {
    const auto backend = make_mpi_backend();
    const int N = world().size();
    const int64_t size = 1000 * N, bytes = 4 * size;
    Tensor x = numbers(DType::f32, size, [](int64_t) { return 1; });
    Counting counting(*backend);
    ring_all_reduce(counting, x);
    const int64_t most = int64_t(world().max(double(counting.sent)));
    figure("bytes that a rank sends", most, 2 * bytes * (N - 1) / N, "B", "2 n (N-1)/N",
           most >= bytes * (N - 1) ? "You send the whole vector in every step; a step needs one of its N segments."
           : most == bytes * (N - 1) / N ? "Only one of the two halves sends: both need N-1 steps."
           : most == 2 * bytes           ? "N steps in each half: the last one sends what the receiver has already."
                                         : "");
    const int64_t messages = int64_t(world().max(double(counting.messages)));
    figure("messages", messages, int64_t(2 * (N - 1)), "", "2 (N-1)");
    Counting odd(*backend);
    Tensor y = numbers(DType::f32, size + 2, [](int64_t) { return 1; });
    ring_all_reduce(odd, y);
    figure("bytes of all ranks, 2 elements more", int64_t(world().sum(double(odd.sent))), 2 * (bytes + 8) * (N - 1),
           "B", "2 n (N-1)",
           "Segments differ in length by one where N does not divide n; `segment` returns the right one.");
}

TEST_CASE("lab: one segment of scratch memory") {
    const auto backend = make_mpi_backend();
    const int N = world().size();
    const int64_t size = 1000 * N, segment = 4 * size / N;
    Tensor x = numbers(DType::f32, size, [](int64_t) { return 1; });
    ledger().reset_peak();
    const int64_t before = ledger().total();
    Counting counting(*backend);
    ring_all_reduce(counting, x);
    const int64_t peak = int64_t(world().max(double(ledger().peak().total - before)));
    figure("scratch memory", peak, segment, "B", "n / N",
           peak >= 4 * size ? "As much as the whole vector: receive one segment at a time." : "",
           8.0 / double(segment));
}
