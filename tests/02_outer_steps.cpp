// DiLoCo: N ranks against N replicas one after another, and the bytes that the formula says.
#include "02_data_parallel/complete/outer_run.h"
#include "tests/parallel.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// A run of `o` with outer steps on all ranks of comm.
struct Outer {
    std::unique_ptr<OuterSteps> store;
    std::vector<std::map<std::string, CommStats::Entry>> sent;  // in each step
    Session session;

    Outer(TrainOptions o, const Comm& comm, const OuterOptions& outer)
        : session(divided(o, comm.size()), [&](Session& s) {
              store = std::make_unique<OuterSteps>(s.model, comm, outer, o.steps, AdamW::maker(s.options.adamw()));
              use_store(s.trainer, *store, comm);
              s.trainer.step_states.push_back(store.get());
              s.on_step = [&, comm](const StepReport&) { sent.push_back(comm.take_stats().operations); };
          }) {
        comm.take_stats();
        session.run();
    }
    static TrainOptions divided(TrainOptions o, int64_t ranks) {
        o.micro_batch = o.global_batch / ranks;
        return o;
    }
};

// A rank of N in this process alone: it trains on its part of the batches, by the mean over them.
struct Replica : RunControl {
    int64_t N;
    Session session;

    Replica(const TrainOptions& o, int64_t rank, int64_t N)
        : N(N), session(Outer::divided(o, N), [&](Session& s) {
              s.trainer.groups.dp = std::make_shared<Coordinate>(rank, N);
              s.trainer.controls.push_back(this);
          }) {
        session.trainer.start();
    }
    void gradients_ready(int64_t) override {
        for (const Param* param : session.model.params())
            for (int64_t i = 0; i < param->grad.size(); ++i) param->grad.data<double>()[i] *= double(N);
    }
};

struct Reference {
    std::vector<double> losses, norms, weights;  // of all replicas; of the first one; in the end
};

// Algorithm 1 of the paper, and fragments, in plain loops over replicas; PyTorch's form of Nesterov momentum.
Reference in_plain_loops(const TrainOptions& o, int64_t N, int64_t H, int64_t P, double lr, double momentum) {
    std::vector<std::unique_ptr<Replica>> replicas;
    for (int64_t r = 0; r < N; ++r) replicas.push_back(std::make_unique<Replica>(o, r, N));
    const std::vector<Unit*> units = replicas[0]->session.model.units();
    std::vector<int64_t> fragment;  // of each weight, in the order of weights()
    for (size_t i = 0; i < units.size(); ++i)
        for (const Param* param : units[i]->params) fragment.insert(fragment.end(), param->data.size(), i % P);
    std::vector<double> outer = replicas[0]->session.weights(), buffer(outer.size());
    Reference reference;
    for (int64_t step = 1; step <= o.steps; ++step) {
        double loss = 0;
        for (const auto& replica : replicas) loss += replica->session.trainer.step(step).loss;
        reference.losses.push_back(loss);
        reference.norms.push_back(replicas[0]->session.reports.back().grad_norm);
        std::vector<std::vector<double>> weights;
        for (const auto& replica : replicas) weights.push_back(replica->session.weights());
        for (size_t i = 0; i < outer.size(); ++i) {
            if (step < o.steps && (step + fragment[i] * (H / P)) % H != 0) continue;
            double gradient = 0;
            for (const auto& of_replica : weights) gradient += (outer[i] - of_replica[i]) / double(N);
            buffer[i] = momentum * buffer[i] + gradient;
            outer[i] -= lr * (gradient + momentum * buffer[i]);
            for (auto& of_replica : weights) of_replica[i] = outer[i];
        }
        for (int64_t r = 0; r < N; ++r) {
            size_t i = 0;
            for (const Param* param : replicas[r]->session.model.params())
                for (int64_t k = 0; k < param->data.size(); ++k) param->data.data<double>()[k] = weights[r][i++];
        }
    }
    reference.weights = outer;
    return reference;
}

TrainOptions in_fp64(const Text& text, int64_t steps) {
    TrainOptions o = odd(text, 12);
    o.dtype = "fp64";
    o.steps = steps;
    return o;
}

}  // namespace

TEST_CASE("outer steps: 2 and 3 ranks are as many replicas in plain loops, H of 1, 2 and 5, in fragments, to 1e-12") {
    const Text text;
    const TrainOptions o = in_fp64(text, 8);  // with H = 5 the last outer step is early
    struct Case {
        int ranks;
        int64_t H, P;
        double lr = 0.7, momentum = 0.9;
    };
    for (const Case& c : std::vector<Case>{
             {2, 1, 1}, {2, 1, 1, 1, 0}, {3, 2, 1}, {2, 5, 1}, {3, 5, 1}, {2, 2, 2}, {3, 4, 2}, {2, 3, 3}}) {
        Reference reference;
        only_on_rank_0([&] { reference = in_plain_loops(o, c.ranks, c.H, c.P, c.lr, c.momentum); });
        Failures failures;
        on_first_ranks(c.ranks, [&](const Comm& all) {
            const Comm comm = all.split([](int) { return 0; }, "dp");
            Outer run(o, comm, {.every = c.H, .fragments = c.P, .lr = c.lr, .momentum = c.momentum});
            const std::vector<double> weights = run.session.weights();
            failures.expect(same_everywhere(comm, weights), "the ranks' weights differ after the last step");
            if (comm.rank() > 0) return;
            Farthest worst;
            worst.add(distance(weights, reference.weights), "weights");
            for (size_t i = 0; i < reference.losses.size(); ++i) {
                const StepReport& report = run.session.reports[i];
                worst.add(std::abs(report.loss / reference.losses[i] - 1), fmt::format("loss of step {}", i + 1));
                worst.add(std::abs(report.grad_norm / reference.norms[i] - 1), fmt::format("norm of step {}", i + 1));
            }
            std::ostringstream where;
            where << worst;
            failures.expect(worst <= 1e-12, where.str());
        });
        INFO(c.ranks, " ranks, H ", c.H, ", ", c.P, " fragments, momentum ", c.momentum);
        EXPECT_NONE(failures);
    }
}

TEST_CASE("outer steps: one all-reduce of a fragment when it is due, of all in the end; bf16 follows the masters") {
    const Text text;
    TrainOptions o = odd(text, 16);
    o.steps = 7;
    for (const char* dtype : {"fp32", "bf16"})
        for (const int64_t P : {1, 2}) {
            o.dtype = dtype;
            const Comm comm = world().split([](int) { return 0; }, "dp");
            const MemoryBytes before = ledger().now();
            Outer run(o, comm, {.every = 4, .fragments = P});
            const std::vector<int64_t> sizes = fragment_sizes(run.session.model, P);
            const int64_t N = comm.size(), elements = total_size(run.session.model.params());
            int64_t sum = 0;
            INFO(dtype, ", ", P, " fragments");
            for (int64_t step = 1; step <= o.steps; ++step) {
                const CommStats::Entry entry = run.sent[size_t(step - 1)]["dp.all_reduce"];
                const int64_t n = step == 4             ? sizes[0]
                                  : step == 2 && P == 2 ? sizes[1]
                                  : step == 6 && P == 2 ? sizes[1]
                                  : step == o.steps     ? elements
                                                        : 0;
                sum += entry.bytes;
                EXPECT_EVERYWHERE(entry.bytes == 2 * 4 * n * (N - 1) / N);
                EXPECT_EVERYWHERE(entry.calls == (n == 0 ? 0 : n == elements ? P : 1));
            }
            EXPECT_EVERYWHERE(sum == outer_bytes(sizes, 4, N, 4, o.steps));
            EXPECT_EVERYWHERE(same_everywhere(comm, run.session.weights()));
            const size_t kind = size_t(Memory::optimizer);
            EXPECT_EVERYWHERE(run.session.reports[6].memory[kind] - before[kind] ==
                              elements * (AdamW::state_bytes(run.session.model.options.dtype) + 8));
        }
}
