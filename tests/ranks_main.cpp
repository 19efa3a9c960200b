#define DOCTEST_CONFIG_IMPLEMENT  // the header may have been seen without it
#include <doctest/doctest.h>
#include <mpi.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <thread>

#include "tests/ranks.h"

namespace train70b::test {

namespace {
std::optional<Comm> all_ranks;
}

const Comm& world() { return *all_ranks; }

bool everywhere(bool good) {
    if (!good) fmt::print(stderr, "rank {}: the expectation failed here\n", this_rank);
    int mine = good ? 1 : 0, all = 0;
    MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    return all == 1;
}

std::string Failures::of_all_ranks() const {
    constexpr int kLength = 400;
    std::string mine = first_.substr(0, kLength - 1);
    mine.resize(kLength);
    std::vector<char> all(size_t(kLength * world().size()));
    MPI_Allgather(mine.data(), kLength, MPI_CHAR, all.data(), kLength, MPI_CHAR, MPI_COMM_WORLD);
    std::string text;
    for (int rank = 0; rank < world().size(); ++rank)
        if (const std::string theirs = all.data() + kLength * rank; !theirs.empty())
            text += fmt::format("\n  rank {}: {}", rank, theirs);
    return text;
}

namespace {
// A barrier of ranks that sleep.
void sleep_until_all_arrive() {
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Ibarrier(MPI_COMM_WORLD, &request);
    int done = 0;
    for (MPI_Test(&request, &done, MPI_STATUS_IGNORE); !done; MPI_Test(&request, &done, MPI_STATUS_IGNORE))
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
}
}  // namespace

void only_on_rank_0(const std::function<void()>& body) {
    if (this_rank == 0) body();
    sleep_until_all_arrive();
}

void on_first_ranks(int n, const std::function<void(const Comm&)>& body) {
    const Comm group = world().split([n](int rank) { return rank < n ? 0 : 1; }, "group");
    if (world().rank() < n) body(group);
    sleep_until_all_arrive();
}

}  // namespace train70b::test

int main(int argc, char** argv) {
    using namespace train70b;
    int failures = 0;
    const int code = run_ranks(argc, argv, [&failures](int count, char** words) {
        test::all_ranks = connect({.backend = "mpi", .timeout = 100, .check = true}, Device::cpu);
        doctest::Context context(count, words);
        std::ofstream nowhere("/dev/null");
        if (this_rank > 0) context.setCout(&nowhere);
        failures = context.run();
        if (const char* rank = std::getenv("TRAIN70B_FAIL_RANK"); rank && std::atoi(rank) == this_rank) {
            fmt::print(stderr, "rank {}: fails, as TRAIN70B_FAIL_RANK says\n", this_rank);  // test_harness.py
            ++failures;
        }
        test::world().finish();
        test::all_ranks.reset();
    });
    return code != 0 ? code : failures;
}
