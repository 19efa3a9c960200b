// The roles of a run: what a checkpoint needs of a store, and what the trainer does over its groups.
#include <set>

#include "01_single_gpu/complete/roles.h"
#include "tests/training.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("optimizer states: every one of every parameter once, in a fixed order, and their bytes are the ledger's") {
    const Text text;
    for (const char* dtype : {"fp32", "bf16", "fp64"}) {
        TrainOptions o = tiny(text);
        o.dtype = dtype;
        o.steps = 1;
        const MemoryBytes before = ledger().now();
        Session session(o);
        session.run();
        int64_t bytes = 0;
        std::vector<std::string> order;
        session.trainer.store->for_each_state([&](const Segment& segment, const char* name, Tensor& state) {
            if (!state.same_memory(segment.data)) bytes += state.bytes();
            order.push_back(segment.param->name + " " + name);
            EXPECT(state.size() == segment.data.size());
        });
        INFO(dtype);
        EXPECT(bytes == ledger().now()[size_t(Memory::optimizer)] - before[size_t(Memory::optimizer)]);
        EXPECT(order.size() == 3 * session.model.params().size());
        EXPECT(order[0] == "model.embed_tokens.weight weight");
        EXPECT(order[2] == "model.embed_tokens.weight exp_avg_sq");
        EXPECT(std::set<std::string>(order.begin(), order.end()).size() == order.size());
    }
}

TEST_CASE("weights and states of step 2 in another run: its steps 3 and 4 are the same, bit for bit") {
    const Text text;
    for (const char* dtype : {"fp32", "bf16"}) {
        TrainOptions o = tiny(text);
        o.dtype = dtype;
        Session all(o);
        all.run();

        Session first(o), second(o);
        first.trainer.start();
        for (const int64_t step : {1, 2}) first.trainer.step(step);
        std::vector<std::vector<double>> states;
        first.trainer.store->for_each_state(
            [&](const Segment&, const char*, Tensor& state) { states.push_back(values(state)); });

        second.trainer.start();
        for (Param* param : second.model.params()) fill(param->data, 77);  // all of it is written
        size_t i = 0;
        second.trainer.store->for_each_state([&](const Segment&, const char*, Tensor& state) {
            copy(state, tensor(states[i++], state.shape(), DType::f64));
        });
        second.trainer.store->states_changed();
        for (const int64_t step : {3, 4}) second.trainer.step(step);
        INFO(dtype);
        EXPECT(second.weights() == all.weights());
        for (size_t step = 0; step < 2; ++step) {
            EXPECT(second.reports[step].loss == all.reports[step + 2].loss);
            EXPECT(second.reports[step].grad_norm == all.reports[step + 2].grad_norm);
        }
    }
}

// A group of two ranks, as rank 0 sees it: the other one has twice of everything.
struct Doubled : Group {
    int size() const override { return 2; }
    std::vector<double> sum(const std::vector<double>& x) const override { return {3 * x.at(0)}; }
    void sum_tensor(Tensor x) const override { scale(x, 3); }
};

TEST_CASE("the loss is summed over dp_cp and pp, norms over tp and pp, partial gradients over their own group") {
    const Text text;
    TrainOptions o = tiny(text);
    o.steps = 1;
    Session one(o);
    one.run();
    const double loss = one.reports[0].loss, norm = one.reports[0].grad_norm;
    const auto with = [&](const std::function<void(Groups&)>& change) {
        Session session(o, [&](Session& s) { change(s.trainer.groups); });
        session.trainer.controls.clear();  // full parameters would need the other rank
        session.trainer.start();
        return session.trainer.step(1);
    };
    const auto doubled = std::make_shared<Doubled>();
    const StepReport dp = with([&](Groups& g) { g.dp_cp = doubled; });
    EXPECT(dp.loss == 3 * loss);
    EXPECT(dp.grad_norm == norm);
    const StepReport tp = with([&](Groups& g) { g.tp = doubled; });
    EXPECT(tp.loss == loss);
    EXPECT(tp.grad_norm == doctest::Approx(std::sqrt(3.0) * norm).epsilon(1e-12));
    const StepReport pp = with([&](Groups& g) { g.pp = doubled; });
    EXPECT(pp.loss == 3 * loss);
    EXPECT(pp.grad_norm == doctest::Approx(std::sqrt(3.0) * norm).epsilon(1e-12));

    Session session(o, [&](Session& s) { s.model.final_norm.partial_grad_group = doubled; });
    session.run();
    for (size_t i = 0; i < one.gradients.size(); ++i) {
        std::vector<double> expected = one.gradients[i];
        if (one.names[i] == "model.norm.weight")
            for (double& x : expected) x *= 3;
        INFO(one.names[i]);
        EXPECT(distance(session.gradients[i], expected) <= 1e-6);
    }
}
