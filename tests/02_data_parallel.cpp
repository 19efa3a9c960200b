// N ranks against one: the same loss, gradient norm and gradients, whatever algorithm, buckets and overlap; and the
// bytes that the formula says.
#include "02_data_parallel/complete/all_reduce.h"
#include "02_data_parallel/complete/data_parallel.h"
#include "tests/parallel.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// A run of `o` on all ranks of comm.
struct Parallel {
    Comm comm;
    std::unique_ptr<DataParallel> data_parallel;
    std::map<std::string, CommStats::Entry> first_step;
    Session session;

    Parallel(TrainOptions o, const Comm& ranks, double bucket_mb, bool overlap, int64_t accumulation = 1)
        : comm(ranks), session(with_micro_batch(o, ranks.size(), accumulation), [&](Session& s) {
              data_parallel = std::make_unique<DataParallel>(s.model, comm, DataParallelOptions{bucket_mb, overlap},
                                                             AdamW::maker(s.options.adamw()));
              use_store(s.trainer, *data_parallel, comm);
              s.on_step = [this](const StepReport& report) {
                  const CommStats stats = comm.take_stats();
                  if (report.step == 1) first_step = stats.operations;
              };
          }) {
        comm.take_stats();
        session.run();
    }
    static TrainOptions with_micro_batch(TrainOptions o, int64_t ranks, int64_t accumulation) {
        o.micro_batch = o.global_batch / ranks / accumulation;
        return o;
    }
};

}  // namespace

TEST_CASE(
    "2, 4 and 8 ranks, every all-reduce, overlap on and off, buckets of 0.1 and 25 MiB and none: one rank's run") {
    const Text text;
    int64_t drawn = 0;
    for (const Parity& parity : kParity) {
        TrainOptions o = odd(text, 16);
        o.dtype = parity.dtype;
        const int64_t width = size_of(o.llama().grad_dtype),
                      bucket = int64_t(0.1 * (1 << 20)) / width / 64 * 64 * width;
        const auto one = run_on_one_rank(o);
        for (const int ranks : {2, 4, 8}) {
            if (ranks > world().size()) continue;
            int64_t number = 0;
            for (const std::string& algorithm : all_reduce_names())
                for (const bool overlap : {false, true})
                    for (const double bucket_mb : {0.0, 0.1, 25.0}) {
                        if (parity.skips(number++) || !in_quarter(drawn++)) continue;
                        bool near = true, same = true, booked = true;
                        on_first_ranks(ranks, [&](const Comm& all) {
                            const Comm comm = all.split([](int) { return 0; }, "dp");
                            comm.use(algorithm);
                            Parallel run(o, comm, bucket_mb, overlap);
                            const Farthest deviation = deviation_on_rank_0(run.session, one);
                            near = deviation <= parity.bound;
                            if (!near) fmt::print(stderr, "rank {}: {}\n", world().rank(), deviation);
                            same = same_everywhere(comm, run.session.weights());
                            const int64_t G = run.data_parallel->gradient_bytes(), N = ranks;
                            const CommStats::Entry& entry = run.first_step["dp.all_reduce"];
                            booked =
                                entry.bytes == 2 * G * (N - 1) / N && entry.calls == run.data_parallel->buckets() &&
                                run.first_step["dp.scalar"].bytes == 16 * (N - 1) / N && run.first_step.size() == 2;
                            const int64_t expected = bucket_mb == 0  ? int64_t(run.session.model.params().size())
                                                     : bucket_mb > 1 ? 1
                                                                     : (G + bucket - 1) / bucket;
                            booked = booked && entry.calls == expected && (bucket_mb != 0.1 || expected > 2);
                        });
                        world().use("library");
                        INFO(o.dtype, ", ", ranks, " ranks, ", algorithm, ", overlap ", overlap, ", buckets of ",
                             bucket_mb);
                        EXPECT_EVERYWHERE(near);
                        EXPECT_EVERYWHERE(same);
                        EXPECT_EVERYWHERE(booked);
                    }
        }
    }
}

TEST_CASE("3, 5, 6 and 7 ranks; accumulation; recomputation") {
    const Text text;
    int64_t drawn = 0;
    for (const int ranks : {3, 5, 6, 7}) {
        if (ranks > world().size()) continue;
        for (const Parity& parity : kParity)
            for (const char* recompute : {"none", "full"}) {
                TrainOptions o = odd(text, 2 * ranks);
                o.dtype = parity.dtype;
                o.recompute = recompute;
                std::unique_ptr<Session> one;
                bool first = true;
                for (const int64_t accumulation : {1, 2}) {
                    if (parity.skips(accumulation - 1 + (recompute == std::string("full")))) continue;
                    if (!in_half(drawn++)) continue;
                    if (std::exchange(first, false)) one = run_on_one_rank(o);
                    Farthest deviation;
                    int64_t calls = 1, buckets = 1;
                    on_first_ranks(ranks, [&](const Comm& all) {
                        const Comm comm = all.split([](int) { return 0; }, "dp");
                        comm.use(ranks % 2 ? "ring" : "halving");
                        Parallel run(o, comm, 0.1, true, accumulation);
                        deviation = deviation_on_rank_0(run.session, one);
                        calls = run.first_step["dp.all_reduce"].calls;
                        buckets = run.data_parallel->buckets();
                    });
                    world().use("library");
                    INFO(ranks, " ranks, accumulation ", accumulation, ", recompute ", recompute, ": ", deviation);
                    EXPECT_EVERYWHERE(deviation <= parity.bound);
                    EXPECT_EVERYWHERE(calls == buckets);  // once per step, not once per micro-batch
                }
            }
    }
}

TEST_CASE("overlap: buckets leave in order while the last micro-batch's backward pass goes on; without it, after") {
    const Text text;
    for (const auto& [overlap, micro_batches] :
         std::vector<std::pair<bool, int64_t>>{{false, 1}, {true, 1}, {true, 2}}) {
        std::vector<std::string> order;
        TrainOptions o = odd(text, 16);
        o.steps = 1;
        o.micro_batch = o.global_batch / world().size() / micro_batches;
        std::unique_ptr<DataParallel> data_parallel;
        Session session(o, [&](Session& s) {
            // Recorded around everything, so in the backward pass this is heard after the unit's buckets have left.
            data_parallel = std::make_unique<DataParallel>(s.model, world(), DataParallelOptions{0.1, overlap},
                                                           AdamW::maker(s.options.adamw()));
            for (Unit* unit : s.model.units())
                unit->wrappers.insert(
                    unit->wrappers.begin(), [&, unit](Tape& tape, const Var& x, const Unit::Body& body) {
                        tape.record([&, unit] {
                            const auto stats = world().take_stats().operations;
                            const auto found = stats.find("world.all_reduce");
                            order.push_back(
                                fmt::format("{} {}", unit->name, found == stats.end() ? 0 : found->second.calls));
                        });
                        return body(tape, x);
                    });
            use_store(s.trainer, *data_parallel, world());
        });
        world().take_stats();
        session.run();
        // Bytes of units: head 31,680; a block about 98 KiB; 0.1 MiB is 104,832 bytes: none is complete after the head.
        const int64_t buckets = data_parallel->buckets();
        int64_t sent = 0;
        for (const std::string& line : order) sent += std::stoll(line.substr(line.rfind(' ')));
        EXPECT_EVERYWHERE(int64_t(order.size()) == 4 * micro_batches);
        if (micro_batches == 2)  // none may leave with half a sum; over MPI they would be sent late enough to be right
            EXPECT_EVERYWHERE(std::vector<std::string>(order.begin(), order.begin() + 4) ==
                              std::vector<std::string>{"head 0", "block 1 0", "block 0 0", "embedding 0"});
        order.erase(order.begin(), order.end() - 4);
        INFO(overlap, " ", order[0], ", ", order[1], ", ", order[2], ", ", order[3]);
        EXPECT_EVERYWHERE(order[0] == "head 0" && order[3].starts_with("embedding"));
        EXPECT_EVERYWHERE(sent == (overlap ? buckets : 0));
        if (overlap) EXPECT_EVERYWHERE(order[1] == "block 1 1" && order[2] == "block 0 1" && buckets == 3);
    }
}

TEST_CASE("bf16 gradients: half the bytes, and a run that follows the one-rank run") {
    const Text text;
    TrainOptions o = odd(text, 16);
    o.dtype = o.grad_dtype = "bf16";
    const auto one = run_on_one_rank(o);
    for (const std::string algorithm : {"ring", "halving", "library"}) {
        world().use(algorithm);
        Parallel run(o, world().split([](int) { return 0; }, "dp"), 0.1, true);
        const int64_t elements = total_size(run.session.model.params()), N = world().size();
        EXPECT_EVERYWHERE(run.data_parallel->gradient_bytes() == 2 * elements);
        EXPECT_EVERYWHERE(run.first_step["dp.all_reduce"].bytes == 4 * elements * (N - 1) / N);
        EXPECT_EVERYWHERE(deviation_on_rank_0(run.session, one) <= 3e-2);
        EXPECT_EVERYWHERE(same_everywhere(world(), run.session.weights()));
    }
    world().use("library");
}

TEST_CASE("memory: a replica costs the same on every number of ranks; evaluation is one rank's") {
    const Text text;
    TrainOptions o = odd(text, 16);
    o.val_fraction = 0.3;
    EvaluatedRun one(o);
    const MemoryBytes before = ledger().now();
    Parallel run(o, world(), 25, true);
    EXPECT_EVERYWHERE(one.evaluates_like(run.session));
    for (const Memory kind : {Memory::params, Memory::grads, Memory::optimizer}) {
        const double alone = world().sum(one.session ? double(one.session->reports[3].memory[size_t(kind)]) : 0);
        EXPECT_EVERYWHERE(double(run.session.reports[3].memory[size_t(kind)] - before[size_t(kind)]) == alone);
    }
}

TEST_CASE("tied embeddings: the matrix is reduced once, after its second use; one rank's run") {
    const Text text;
    int64_t drawn = 0;
    for (const Parity& parity : kParity) {
        TrainOptions o = odd(text, 16);
        o.dtype = parity.dtype;
        o.model.tied = true;
        const auto one = run_on_one_rank(o);
        for (const int64_t accumulation : {1, 2})
            for (const double bucket_mb : {0.0, 0.1, 25.0}) {
                if (!in_half(drawn++)) continue;
                Parallel run(o, world().split([](int) { return 0; }, "dp"), bucket_mb, true, accumulation);
                const Farthest deviation = deviation_on_rank_0(run.session, one);
                INFO(o.dtype, ", buckets of ", bucket_mb, ", accumulation ", accumulation, ": ", deviation);
                EXPECT_EVERYWHERE(deviation <= parity.bound);
                EXPECT_EVERYWHERE(same_everywhere(world(), run.session.weights()));
                const int64_t G = run.data_parallel->gradient_bytes(), N = world().size();
                EXPECT_EVERYWHERE(G == size_of(o.llama().grad_dtype) * o.model.parameters());
                EXPECT_EVERYWHERE(run.first_step["dp.all_reduce"].bytes == 2 * G * (N - 1) / N);
            }
    }
}
