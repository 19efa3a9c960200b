#pragma once
// What tests of several ranks compare with a run on one.
#include "01_single_gpu/complete/experts/expert_balance.h"
#include "tests/ranks.h"
#include "tests/training.h"

namespace train70b::test {

// For what only rank 0 knows: true on the other ranks.
inline bool on_rank_0(bool good) { return world().rank() > 0 || good; }

// Whether all ranks of comm have the same bits. Collective.
inline bool same_everywhere(const Comm& comm, const std::vector<double>& mine) {
    Tensor first({int64_t(mine.size())}, DType::f64, Device::cpu);
    std::copy(mine.begin(), mine.end(), first.data<double>());
    comm.broadcast(first, 0).wait();
    return std::equal(mine.begin(), mine.end(), first.data<double>());
}

// The options' run in one micro-batch on rank 0 alone; empty on the other ranks, which sleep meanwhile. Collective.
// apply: as Session's.
inline std::unique_ptr<Session> run_on_one_rank(TrainOptions o, const std::function<void(Session&)>& apply = {}) {
    std::unique_ptr<Session> one;
    o.micro_batch = o.global_batch;
    only_on_rank_0([&] {
        one = std::make_unique<Session>(o, apply);
        one->run();
    });
    DOCTEST_REQUIRE((one != nullptr) == (this_rank == 0));
    return one;
}

// worst_deviation on rank 0, which has the gathered gradients; 0 on the other ranks.
inline Farthest deviation_on_rank_0(const Session& run, const Session& one) {
    return world().rank() == 0 ? worst_deviation(run, one) : Farthest();
}
inline Farthest deviation_on_rank_0(const Session& run, const std::unique_ptr<Session>& one) {
    return one ? worst_deviation(run, *one) : Farthest();
}

// The load of experts in each step, and what the losses that balance it add.
inline void expect_equal_loads(const Session& run, const Session& one) {
    REQUIRE(run.reports.size() == one.reports.size());
    for (size_t step = 0; step < one.reports.size(); ++step) {
        const ExpertReport &mine = *experts_of(run.reports[step]), &whole = *experts_of(one.reports[step]);
        EXPECT(std::abs(mine.max_over_mean - whole.max_over_mean) <= 1e-12);
        EXPECT(std::abs(mine.entropy - whole.entropy) <= 1e-12);
        EXPECT(std::abs(mine.dropped - whole.dropped) <= 1e-12);
        EXPECT(mine.dead == whole.dead);
        EXPECT(std::abs(mine.aux_loss - whole.aux_loss) <= 1e-12);
        EXPECT(std::abs(mine.z_loss - whole.z_loss) <= 1e-12);
    }
}

// All parameters' data or gradients, one behind another, on rank 0; empty on the other ranks. Collective.
inline std::vector<double> gathered(const Session& session, Which which) {
    std::vector<double> list;
    for (const Param& param : all_params(session.options.model)) {
        const Tensor full = session.trainer.full(param, which);
        if (!full) continue;
        EXPECT(full.shape() == param.global_shape);
        const std::vector<double> part = values(full);
        list.insert(list.end(), part.begin(), part.end());
    }
    return list;
}

// One rank's run, on rank 0 alone, and what it evaluates to, on all. The options need a validation part.
struct EvaluatedRun {
    std::unique_ptr<Session> session;
    double loss = 0;

    explicit EvaluatedRun(const TrainOptions& o) {
        only_on_rank_0([&] {
            session = std::make_unique<Session>(o);
            loss = evaluate(session->run().trainer);
        });
        loss = world().sum(loss);
    }
    // Whether `other`, on several ranks, evaluates to the same in fp32. Collective.
    bool evaluates_like(Session& other) const { return std::abs(evaluate(other.trainer) / loss - 1) <= 5e-6; }
    // Whether the weights of `other` are these, up to what four steps of AdamW make of the last bits. Collective.
    bool trained_like(const Session& other) {
        const std::vector<double> whole = gathered(other, Which::data);
        return world().rank() > 0 || distance(whole, session->weights()) <= 1e-4;
    }
};

}  // namespace train70b::test
