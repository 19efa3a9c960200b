// Grades the lab zero-update. fp64: sums in another order differ by less than any mistake.
#include "03_zero/complete/zero.h"
#include "tests/labs.h"
#include "tests/parallel.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// No unit is divisible by 4. A weight decay that shows after a step.
TrainOptions options(const Text& text) {
    TrainOptions o = odd(text, 8);
    o.model.hidden = 54;
    o.model.heads = 9;
    o.dtype = "fp64";
    o.steps = 1;
    o.warmup_steps = 0;
    o.lr = o.min_lr = 1e-2;
    o.weight_decay = 2;
    o.eps = 1e-3;  // of the gradients' size
    o.clip = 0;
    return o;
}

struct Sharded {
    std::unique_ptr<Zero> zero;
    StepStats stats;
    Session session;

    Sharded(TrainOptions o, int stage)
        : stats(world()), session(divided(o), [&](Session& s) {
              zero = std::make_unique<Zero>(s.model, world(), ZeroOptions{.stage = stage},
                                            AdamW::maker(s.options.adamw()));
              use_store(s.trainer, *zero, world());
              s.trainer.runtime = &stats;
          }) {
        session.run();
    }
    static TrainOptions divided(TrainOptions o) {
        o.micro_batch = o.global_batch / world().size();
        return o;
    }
    int64_t bytes() const {  // of the last step's collectives; gradients are sent to rank 0 to be compared
        int64_t sum = 0;
        for (const auto& [name, entry] : stats.sent)
            sum += name.ends_with("scalar") || name.ends_with("send") ? 0 : entry.bytes;
        return sum;
    }
};

// Elements of each unit.
std::vector<int64_t> unit_sizes(const TrainOptions& o) {
    Llama model(o.model, o.llama());
    std::vector<int64_t> sizes;
    for (const Unit* unit : model.units()) sizes.push_back(total_size(unit->params));
    return sizes;
}

int64_t shard_size(int64_t unit) { return (unit + world().size() - 1) / world().size(); }

int64_t padded(const TrainOptions& o) {
    int64_t sum = 0;
    for (const int64_t size : unit_sizes(o)) sum += shard_size(size) * world().size();
    return sum;
}

// Parameters that are off, by kind: of the matrices [0], of the vectors [1].
struct Off {
    int64_t matrices = 0, vectors = 0;
    void add(const Param& param, bool good) { (param.is_matrix() ? matrices : vectors) += !good; }
    void report(const std::string& of) const {
        const int64_t m = int64_t(world().max(double(matrices))), v = int64_t(world().max(double(vectors)));
        figure(
            "matrices that differ from one rank's, " + of, m, int64_t(0), "", "none",
            "There are elements that are not updated as their parameter asks: of another shard's place in the unit, or "
            "not at all, or the new weights have not arrived (who waits for the Work?).");
        figure("vectors that differ from one rank's, " + of, v, int64_t(0), "", "none",
               m == 0 ? "Weight decay reaches the vectors: a shard is not one parameter, it has segments." : "");
    }
};

}  // namespace

TEST_CASE("lab: one norm") {
    const Text text;
    const TrainOptions o = options(text);
    Session one(o);
    one.run();
    Sharded run(o, 1);
    const double mine = run.session.reports[0].grad_norm, expected = one.reports[0].grad_norm;
    const double least = -world().max(-mine), most = world().max(mine);
    figure("gradient norm, the largest of any rank", most, expected, "", "as on one rank",
           least != most
               ? "This is no norm of the summed gradients: one rank's shards only, or gradients before their sum."
               : "",
           1e-10);
    figure("the smallest of any rank", least, expected, "", "as on one rank", "", 1e-10);
}

TEST_CASE("lab: the weights after a step, stage 1") {
    const Text text;
    const TrainOptions o = options(text);
    Session one(o);
    one.run();
    Sharded run(o, 1);
    Off off;
    const std::vector<Param*> params = run.session.model.params(), expected = one.model.params();
    for (size_t i = 0; i < params.size(); ++i)
        off.add(*params[i], distance(values(params[i]->data), values(expected[i]->data)) <= 1e-10);
    off.report("on any rank");
}

TEST_CASE("lab: the weights after several steps, with another rate and clipped gradients, stage 1") {
    const Text text;
    TrainOptions o = options(text);
    o.steps = 3;  // the third step's loss shows the second update
    o.min_lr = 1e-3;
    o.clip = 1e-2;
    Session one(o);
    one.run();
    REQUIRE(one.reports[0].grad_norm > 2 * o.clip);
    Sharded run(o, 1);
    Failures failures;
    const Farthest deviation = deviation_on_rank_0(run.session, one);
    failures.expect(deviation <= 1e-10,
                    fmt::format("off by {:.2g} at {}: update() takes the step, its rate, and grad_scale, by which the "
                                "gradients are clipped",
                                double(deviation), deviation.where));
    EXPECT_NONE(failures);
}

TEST_CASE("lab: the weights after a step, stages 2 and 3") {
    const Text text;
    const TrainOptions o = options(text);
    Session one(o);
    one.run();
    for (const int stage : {2, 3}) {
        Sharded run(o, stage);
        Off off;
        for (Param* param : one.model.params())
            for (const Param* sharded : run.session.model.params())
                if (sharded->name == param->name) {
                    const Tensor full = run.session.trainer.full(*sharded, Which::data);
                    off.add(*param, !full || distance(values(full), values(param->data)) <= 1e-10);
                }
        off.report(fmt::format("stage {}", stage));
        if (stage < 3) continue;
        const int64_t N = world().size(), P = 8 * padded(o);
        figure("bytes that a rank sends, stage 3", run.bytes(), 3 * P * (N - 1) / N, "B", "(2 P + G) (N-1)/N",
               "In stage 3 the update sends nothing: the next forward pass gathers the new weights.");
    }
}

TEST_CASE("lab: what the optimizer keeps") {
    const Text text;
    const TrainOptions o = options(text);
    const int64_t before = ledger().now()[int(Memory::optimizer)];
    Sharded run(o, 1);
    int64_t all = 0, shards = 0;
    for (const int64_t size : unit_sizes(o)) all += size, shards += shard_size(size);
    const int64_t mine = run.session.reports[0].memory[int(Memory::optimizer)] - before;
    const int64_t sum = int64_t(world().sum(double(mine)));
    figure("optimizer states of all ranks", sum, 16 * all, "B", "two moments of 8 B for each parameter, on one rank",
           sum == 16 * all * world().size()
               ? "Every rank keeps the states of the whole model: this is stage 0's memory."
           : sum == 16 * padded(o) ? "There are states for padding."
                                   : "");
    figure("the most of any rank", int64_t(world().max(double(mine))), 16 * shards, "B",
           "16 B for each element of its shards");
}

TEST_CASE("lab: what a step sends") {
    const Text text;
    const TrainOptions o = options(text);
    const int64_t N = world().size(), P = 8 * padded(o);
    const int64_t stage1 = Sharded(o, 1).bytes();
    figure("bytes that a rank sends, stage 1", stage1, 2 * P * (N - 1) / N, "B", "(G + P) (N-1)/N",
           stage1 == P * (N - 1) / N       ? "The new weights of the other ranks never arrive: nothing is gathered."
           : stage1 == 3 * P * (N - 1) / N ? "An all-reduce sends them twice: an all-gather is its second half."
                                           : "");
}
