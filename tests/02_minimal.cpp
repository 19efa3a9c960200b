// 02_data_parallel/minimal.cpp: a ring over MPI, on the host.
#define main minimal_main
#include "02_data_parallel/minimal.cpp"
#undef main
#include "tests/minimal.h"
#include "tests/ranks.h"

using namespace train70b;
using namespace train70b::test;

namespace {
struct FirstRanks {  // an MPI communicator of them
    MPI_Comm comm = MPI_COMM_NULL;
    explicit FirstRanks(int count) {
        MPI_Group all, some;
        const int range[1][3] = {{0, count - 1, 1}};
        MPI_Comm_group(MPI_COMM_WORLD, &all);
        MPI_Group_range_incl(all, 1, const_cast<int(*)[3]>(range), &some);
        MPI_Comm_create_group(MPI_COMM_WORLD, some, 0, &comm);
        MPI_Group_free(&some);
        MPI_Group_free(&all);
    }
    ~FirstRanks() { MPI_Comm_free(&comm); }
};
}  // namespace

TEST_CASE("1, 2, 4 and 8 ranks: the complete program's losses, norms and gradients, to 1e-10") {
    if (kEmulated) return;
    const minimal::Sizes s = small_sizes();
    const auto whole_program = complete(s);
    Failures failures;
    for (const int n : {1, 2, 4, 8})
        on_first_ranks(n, [&](const Comm&) {
            const FirstRanks first(n);
            minimal::Training training(s, minimal::Ranks(first.comm));
            const Comparison result = compare(training, *whole_program, Whole{training.model});
            failures.expect(result.worst <= 1e-10,
                            fmt::format("{} ranks: {} at {}", n, double(result.worst), result.worst.where));
            failures.expect(result.elements == double(options_of(s, 1).model.parameters()), "parameters left out");
        });
    EXPECT_NONE(failures);
}

TEST_CASE("the ring: sums of buffers that do not divide by the ranks, several at once, to the bit of integers") {
    if (kEmulated) return;
    const minimal::Ranks world(MPI_COMM_WORLD);
    std::vector<Tensor> buffers;
    std::vector<minimal::RingAllReduce> rings;
    for (const int64_t size : {1, 5, 8, 1001}) {
        Tensor x({size}, DType::f32, Device::cpu);
        for (int64_t i = 0; i < size; ++i) x.data<float>()[i] = float(world.rank * 1000 + i);
        buffers.push_back(x);
        rings.emplace_back(x, world, int(rings.size()));
    }
    bool good = true;
    for (size_t i = buffers.size(); i-- > 0;) {
        while (!rings[i].advance()) {}
        const int64_t ranks = world.size;
        for (int64_t j = 0; j < buffers[i].size(); ++j)
            good = good && buffers[i].data<float>()[j] == float(1000 * ranks * (ranks - 1) / 2 + ranks * j);
    }
    EXPECT_EVERYWHERE(good);
}
