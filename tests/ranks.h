#pragma once
// Tests that need several ranks: CTest starts them under mpirun. Every rank runs every test case and all of them agree
// before anyone asserts: one rank failing alone would leave the others hanging.
#include "01_single_gpu/complete/trainer.h"
#include "02_data_parallel/runtime/comm_roles.h"
#include "02_data_parallel/runtime/connect.h"
#include "tests/support.h"

namespace train70b::test {

const Comm& world();  // all ranks, with --comm-check on

// True on all ranks or on none: whether `good` is true on all. Names the ranks where it is not.
bool everywhere(bool good);
#define EXPECT_EVERYWHERE(...) DOCTEST_CHECK(train70b::test::everywhere(__VA_ARGS__))

// Checks on some ranks only, as in on_first_ranks: a Failures object collects there what failed, and EXPECT_NONE, on
// all ranks, fails with the first failure of each.
class Failures {
  public:
    void expect(bool good, const std::string& what) {
        if (!good && first_.empty()) first_ = what;
    }
    std::string of_all_ranks() const;  // collective; the same text on every rank, empty if nothing failed

  private:
    std::string first_;
};
#define EXPECT_NONE(failures)                                        \
    do {                                                             \
        const std::string failures_text = (failures).of_all_ranks(); \
        DOCTEST_CHECK_MESSAGE(failures_text.empty(), failures_text); \
    } while (0)

// Rank 0 runs the body; the others sleep until it is done, instead of taking its core to poll.
void only_on_rank_0(const std::function<void()>& body);

// The trainer's parameters are held by `store`, over the ranks of dp_cp.
inline void use_store(Trainer& trainer, ParamStore& store, const Comm& dp_cp) {
    trainer.store = &store;
    trainer.groups.dp = trainer.groups.dp_cp = group_of(dp_cp);
}

// What all groups of a rank booked in the last step.
struct StepStats : Runtime {
    explicit StepStats(const Comm& comm) : of(comm) {}
    void begin_step() override { of.take_stats(); }
    void end_step(StepReport&) override { sent = of.take_stats().operations; }
    const Comm of;
    std::map<std::string, CommStats::Entry> sent;
};

// The first n ranks as a group; the body runs on them only, and the others sleep until it is done.
void on_first_ranks(int n, const std::function<void(const Comm&)>& body);

}  // namespace train70b::test
