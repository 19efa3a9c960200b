#pragma once
// Tests that need several ranks: CTest starts them under mpirun. Every rank runs every test case and all of them agree
// before anyone asserts: one rank failing alone would leave the others hanging.
#include "02_data_parallel/runtime/launch.h"
#include "tests/support.h"

namespace train70b::test {

const Comm& world();  // all ranks, with --comm-check on

// True on all ranks or on none: whether `good` is true on all. Names the ranks where it is not.
bool everywhere(bool good);
#define EXPECT_EVERYWHERE(...) DOCTEST_CHECK(train70b::test::everywhere(__VA_ARGS__))

// Rank 0 runs the body; the others sleep until it is done, instead of taking its core to poll.
void only_on_rank_0(const std::function<void()>& body);

// The first n ranks as a group; the body runs on them only.
void on_first_ranks(int n, const std::function<void(const Comm&)>& body);

}  // namespace train70b::test
