#pragma once
// What tests of several ranks compare with a run on one.
#include "tests/ranks.h"
#include "tests/training.h"

namespace train70b::test {

// For what only rank 0 knows: true on the other ranks.
inline bool on_rank_0(bool good) { return world().rank() > 0 || good; }

// worst_deviation on rank 0, which has the gathered gradients; 0 on the other ranks.
inline Farthest deviation_on_rank_0(const Session& run, const Session& one) {
    return world().rank() == 0 ? worst_deviation(run, one) : Farthest();
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

// One rank's run and what it evaluates to. The options need a validation part.
struct EvaluatedRun {
    Session session;
    double loss;

    explicit EvaluatedRun(const TrainOptions& o) : session(o), loss(session.run().trainer.evaluate()) {}
    // Whether `other`, on several ranks, evaluates to the same in fp32. Collective.
    bool evaluates_like(Session& other) const { return std::abs(other.trainer.evaluate() / loss - 1) <= 5e-6; }
    // Whether the weights of `other` are these, up to what four steps of AdamW make of the last bits. Collective.
    bool trained_like(const Session& other) {
        const std::vector<double> whole = gathered(other, Which::data);
        return world().rank() > 0 || distance(whole, session.weights()) <= 1e-4;
    }
};

}  // namespace train70b::test
