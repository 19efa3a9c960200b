// Every schedule against one rank; what each rank holds; zero-bubble bit for bit.
#include "tests/staged.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("every schedule on 1, 2, 4 and 8 stages, 4, 8 and 16 micro-batches, recomputation: one rank's run") {
    const Text text;
    REQUIRE(world().size() == 8);
    int64_t run_number = 0;
    for (const Parity& parity : kParity)
        for (const char* recompute : {"none", "pointwise", "selective", "full"}) {
            std::map<int64_t, std::unique_ptr<Session>> one;  // by size of the global batch
            int64_t number = 0;
            for (const std::string& schedule : kSchedules)
                for (const int64_t pp : {1, 2, 4, 8})
                    for (const int64_t m : {4, 8, 16}) {
                        if (has_chunks(schedule) && (pp == 1 || pp == 8)) continue;
                        if (!works(schedule, pp, m)) continue;
                        const std::string level = recompute;
                        if ((level == "pointwise" || level == "selective" || !kThorough) && m != 4) continue;
                        if (parity.skips(number++) || !in_slice(run_number++)) continue;
                        TrainOptions o = shape(text);
                        o.dtype = parity.dtype;
                        o.recompute = recompute;
                        o.seq_len = 7;
                        o.global_batch = o.micro_batch = 8 / pp * m;
                        if (!one.contains(o.global_batch)) one[o.global_batch] = run_on_one_rank(o);
                        const PipelineOptions options{.schedule = schedule};
                        Staged run(o, world(), pp, options, m);
                        run.session.run();
                        const Farthest deviation = deviation_on_rank_0(run.session, one[o.global_batch]);
                        INFO(o.dtype, ", ", schedule, ", pp ", pp, ", m ", m, ", recompute ", std::string(recompute),
                             ": ", deviation);
                        EXPECT_EVERYWHERE(deviation <= parity.bound);
                        EXPECT_EVERYWHERE(run.pipeline->most_in_flight() ==
                                          in_flight_formula(pipeline_schedule(options, pp, m), run.stages.rank()));
                    }
        }
}

TEST_CASE("three stages, and more stages than micro-batches; rounds through a ring of odd length") {
    const Text text;
    for (const Parity& parity : kParity) {
        TrainOptions o = shape(text);
        o.dtype = parity.dtype;
        o.model.layers = 6;
        o.global_batch = o.micro_batch = 6;
        const auto one = run_on_one_rank(o);
        for (const int n : {2, 3, 6})
            on_first_ranks(n, [&](const Comm& ranks) {
                int64_t number = 0;
                for (const std::string& schedule : kSchedules)
                    for (const int64_t m : {2, 3, 6}) {
                        if ((has_chunks(schedule) && n == 6) || !works(schedule, n, m)) continue;
                        const int64_t at = number++;
                        if (parity.skips(at) || !in_quarter(at / parity.each)) continue;
                        PipelineOptions options{.schedule = schedule};
                        if (in_v(schedule) && n == 2) options.stage_layers = {2, 1, 2, 1};
                        if (has_chunks(schedule) && !in_v(schedule)) options.virtual_stages = 6 / n;
                        Staged run(o, ranks, n, options, m);
                        run.session.run();
                        const Farthest deviation = deviation_on_rank_0(run.session, one);
                        INFO(schedule, ", pp ", n, ", m ", m, ": ", deviation);
                        EXPECT(ranks.max(deviation) <= parity.bound);
                    }
            });
    }
}

TEST_CASE("evaluation between the steps changes nothing of them") {
    const Text text;
    TrainOptions o = shape(text);
    o.val_fraction = 0.3;
    int64_t number = 0;
    for (const char* schedule : {"1f1b", "interleaved", "zero-bubble", "zb-v"}) {
        if (!in_half(number++)) continue;
        Staged without(o, world(), 4, {.schedule = schedule}, 4);
        without.session.run();
        o.eval_every = 1;
        Staged with(o, world(), 4, {.schedule = schedule}, 4);
        with.session.run();
        o.eval_every = 0;
        EXPECT_EVERYWHERE(with.session.history() == without.session.history());
        EXPECT_EVERYWHERE(with.session.weights() == without.session.weights());
    }
}

TEST_CASE("zero-bubble is 1F1B bit for bit: losses, norms, gradients, weights after four steps; and 1F1B is GPipe") {
    const Text text;
    int64_t number = 0;
    for (const char* dtype : {"fp32", "bf16"})
        for (const char* recompute : {"none", "full"})
            for (const int64_t pp : {2, 4}) {
                if (!in_quarter(number++)) continue;
                TrainOptions o = shape(text);
                o.dtype = dtype;
                o.recompute = recompute;
                Staged first(o, world(), pp, {.schedule = "1f1b"}, 4);
                first.session.run();
                for (const char* schedule : {"zero-bubble", "gpipe", "naive"}) {
                    Staged other(o, world(), pp, {.schedule = schedule}, 4);
                    other.session.run();
                    INFO(std::string(schedule), " ", std::string(dtype), ", pp ", pp, ", recompute ",
                         std::string(recompute));
                    EXPECT_EVERYWHERE(other.session.history() == first.session.history());
                    EXPECT_EVERYWHERE(other.session.gradients == first.session.gradients);
                    EXPECT_EVERYWHERE(other.session.weights() == first.session.weights());
                }
            }
}

TEST_CASE("in a V: zb-v is dualpipe-v and a file bit for bit, and 1F1B's losses and gradients of the first step") {
    const Text text;
    const std::string file = text.folder / "zb_v.txt", mixed = text.folder / "mixed.txt";
    write_text(file, schedule_text(make_schedule("zb-v", 2, 4)));
    // B and I, W on one rank; W of chunk 1 after the last step of chunk 0.
    write_text(mixed,
               "stages: 0 3 / 1 2\n"
               "F0 F1 F0.1 I0.1 B0 F2 F1.1 B1.1 I1 F3 F2.1 B2.1 B2 F3.1 I3.1 B3 W1 W0.1 W3.1\n"
               "F0 F0.1 F1 F1.1 B0.1 I0 F2 F2.1 I1.1 B1 F3 F3.1 B2.1 B2 B3.1 B3 W1.1 W0\n");
    int64_t number = 0;
    for (const char* dtype : {"fp32", "bf16"})
        for (const char* recompute : {"none", "full"}) {
            if (!in_quarter(number++)) continue;
            TrainOptions o = shape(text);
            o.dtype = dtype;
            o.recompute = recompute;
            // On data-parallel ranks the ring adds in an order that depends on where a parameter is in its bucket.
            on_first_ranks(2, [&](const Comm& ranks) {
                Staged plain(o, ranks, 2, {.schedule = "1f1b"}, 4), v(o, ranks, 2, {.schedule = "zb-v"}, 4);
                plain.session.run();
                v.session.run();
                EXPECT(ranks.max(v.session.reports[0].loss != plain.session.reports[0].loss) == 0);
                EXPECT(ranks.max(v.session.gradients != plain.session.gradients) == 0);
            });
            Staged first(o, world(), 2, {.schedule = "zb-v"}, 4);
            first.session.run();
            for (const std::string& schedule : {std::string("dualpipe-v"), "file:" + file, "file:" + mixed}) {
                Staged other(o, world(), 2, {.schedule = schedule}, 4);
                other.session.run();
                INFO(schedule, " ", std::string(dtype), ", recompute ", std::string(recompute));
                EXPECT_EVERYWHERE(other.session.reports[0].loss == first.session.reports[0].loss);
                const bool in_order = !schedule.ends_with("mixed.txt");  // of the weight gradients
                if (in_order) {
                    EXPECT_EVERYWHERE(other.session.history() == first.session.history());
                    EXPECT_EVERYWHERE(other.session.gradients == first.session.gradients);
                    EXPECT_EVERYWHERE(other.session.weights() == first.session.weights());
                } else {
                    const Farthest deviation = deviation_on_rank_0(other.session, first.session);
                    EXPECT_EVERYWHERE(deviation <= (o.dtype == "fp32" ? 5e-6 : 2e-2));
                }
            }
        }
}

TEST_CASE(
    "a file decides where the stages are: the embedding on the third of three ranks, the head on the second, and "
    "neighbours on one rank") {
    const Text text;
    const std::string file = text.folder / "placed.txt";
    write_text(file,
               "stages: 1 2 / 4 5 / 0 3\n"
               "F0 F0.1 F1 F1.1 B0.1 B0 B1.1 B1\n"
               "F0 F0.1 B0.1 B0 F1 F1.1 B1.1 B1\n"
               "F0 F1 F0.1 F1.1 B0.1 B0 B1.1 B1\n");
    int64_t number = 0;
    for (const Parity& parity : kParity) {
        TrainOptions o = shape(text);
        o.dtype = parity.dtype;
        o.model.layers = 6;
        o.global_batch = o.micro_batch = 6;
        o.val_fraction = 0.3;
        for (const bool tied : {false, true}) {
            if (!in_half(number++)) continue;
            o.model.tied = tied;
            EvaluatedRun one(o);
            on_first_ranks(3, [&](const Comm& ranks) {
                Staged run(o, ranks, 3, {.schedule = "file:" + file}, 2);
                run.session.run();
                const Farthest deviation = deviation_on_rank_0(run.session, one.session);
                INFO(o.dtype, ", tied ", tied, ": ", deviation);
                EXPECT(ranks.max(deviation) <= parity.bound);
                EXPECT(std::abs(evaluate(run.session.trainer) / one.loss - 1) <= 5e-6);
            });
        }
    }
}

TEST_CASE("uneven stages, and chunks of uneven size") {
    const Text text;
    int64_t number = 0;
    for (const Parity& parity : kParity) {
        TrainOptions o = shape(text);
        o.dtype = parity.dtype;
        const auto one = run_on_one_rank(o);
        for (const auto& [options, pp] : std::vector<std::pair<PipelineOptions, int64_t>>{
                 {{.schedule = "1f1b", .stage_layers = {1, 3, 3, 1}}, 4},
                 {{.schedule = "zero-bubble", .stage_layers = {5, 3}}, 2},
                 {{.schedule = "interleaved", .stage_layers = {3, 2, 1, 2}}, 2},
                 {{.schedule = "interleaved", .virtual_stages = 4}, 2},
                 {{.schedule = "zb-v", .stage_layers = {3, 2, 1, 2}}, 2},
                 {{.schedule = "dualpipe-v", .stage_layers = {1, 1, 5, 1}}, 2},
                 {{.schedule = "interleaved", .virtual_stages = 1}, 4},
                 {{.schedule = "gpipe", .stage_layers = {1, 1, 1, 1, 1, 1, 1, 1}}, 8}}) {
            if (!in_quarter(number++)) continue;
            Staged run(o, world(), pp, options, 4);
            run.session.run();
            const Farthest deviation = deviation_on_rank_0(run.session, one);
            INFO(options.schedule, ", pp ", pp, ": ", deviation);
            EXPECT_EVERYWHERE(deviation <= parity.bound);
        }
    }
}

TEST_CASE(
    "the ledger: 16 micro-batches on 4 stages, GPipe keeps at least 2.5 times the activations of 1F1B on rank 0") {
    const Text text;
    TrainOptions o = shape(text);
    on_first_ranks(4, [&](const Comm& ranks) {
        std::map<std::string, std::vector<MemoryPeak>> memory;
        for (const std::string& name : kSchedules) {
            const Watched run(o, ranks, {.schedule = name}, 16);
            memory[name] = run.watch.memory;
            INFO(name);
            for (int64_t rank = 0; rank < 4; ++rank) {
                INFO("rank ", rank);
                EXPECT(run.watch.in_flight[size_t(rank)] == in_flight_formula(run.watch.schedule, rank));
            }
            // Each rank's parameters are its layers', and the first and the last have the vocabulary's.
            // In a V the first has both.
            const int64_t block = o.model.block_parameters() * 4, matrix = o.model.vocab * o.model.hidden * 4,
                          norm = o.model.hidden * 4, head = in_v(name) ? 0 : 3;
            for (int64_t rank = 0; rank < 4; ++rank)
                EXPECT(run.memory(rank)[int(Memory::params)] ==
                       2 * block + (rank == 0 ? matrix : 0) + (rank == head ? matrix + norm : 0));
            // Activations up and gradients down, between any two stages once per micro-batch, except on one rank: of
            // 2 v messages rank 0 has no gradient to send, the head's no activations; at the turn of a V both stay.
            const int64_t n = o.seq_len * o.model.hidden * 4, v = run.watch.schedule.chunks;
            const bool turn = in_v(name) && ranks.rank() == 3;
            const int64_t sends = 16 * (2 * v - (ranks.rank() == 0) - (ranks.rank() == head) - 2 * turn);
            EXPECT(run.sent() == n * sends);
        }
        const auto activations = [&](const char* name, size_t rank) {
            return double(memory.at(name)[rank].kind[int(Memory::activations)]);
        };
        const double ratio = activations("gpipe", 0) / activations("1f1b", 0);
        INFO(ratio);
        EXPECT(ratio >= 2.5);
        EXPECT(activations("1f1b", 0) > activations("1f1b", 2));
        EXPECT(activations("naive", 0) < activations("1f1b", 0));
        // In a V all ranks hold about equally much, and no more than 1F1B's first.
        for (const size_t rank : {0, 1, 2, 3}) EXPECT(activations("zb-v", rank) <= 1.15 * activations("1f1b", 0));
    });
}
