// The simulated step: recordings made by hand, with known times.
#include "tests/grid_layouts.h"
#include "tests/simulated.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// Flows that begin at 0; when each of them ends.
std::vector<double> ends_of(const std::vector<double>& links, const std::vector<std::vector<FlowLoad>>& loads,
                            const std::vector<double>& bytes) {
    Flows flows(links);
    for (size_t i = 0; i < loads.size(); ++i) flows.add(0, bytes[i], loads[i]);
    std::vector<double> ends(loads.size());
    while (flows.next() < 1e300) {
        const double now = flows.next();
        ends[size_t(flows.pop())] = now;
    }
    return ends;
}

}  // namespace

TEST_CASE("flows share a link equally, and what one cannot use is left to the others") {
    EXPECT(ends_of({10}, {{{0, 1}}}, {20}) == std::vector<double>{2});
    EXPECT(ends_of({10}, {{{0, 1}}, {{0, 1}}}, {20, 20}) == std::vector<double>{4, 4});
    // Three: the second crosses both links, of 10 and 3 bytes/s. It and the third get 1.5 each, the first 8.5; after
    // 2 s the first has ended, and nothing changes for the others.
    const std::vector<double> ends = ends_of({10, 3}, {{{0, 1}}, {{0, 1}, {1, 1}}, {{1, 1}}}, {17, 15, 6});
    EXPECT(near(ends[0], 2));
    EXPECT(near(ends[2], 4));            // 6 at 1.5
    EXPECT(near(ends[1], 4 + 9 / 3.0));  // 6 at 1.5, then 9 alone at 3
    // A flow that stands for two takes two shares of the link.
    const std::vector<double> two = ends_of({9}, {{{0, 2}}, {{0, 1}}}, {6, 3});
    EXPECT(near(two[1], 1));
    EXPECT(near(two[0], 1 + 3 / 4.5));
}

TEST_CASE("an all-reduce of two ranks: overlapped, exposed, and behind a slow rank") {
    for (const bool streams : {true, false}) {
        Script overlapped, exposed;
        overlapped.op(1);
        const int32_t id = overlapped.collective(0, 20);
        overlapped.op(3).wait(id).op(1);
        exposed.op(1).wait(exposed.collective(0, 20)).op(4);
        SimulationModel model = plain_model(2, 2, 10, 10);  // 20 bytes each way: 2 s
        model.streams = streams;
        const SimulatedStep hidden = simulate_step(recording_of(2, {}, {overlapped}, [](int64_t) { return 0; }), model);
        const SimulatedStep open = simulate_step(recording_of(2, {}, {exposed}, [](int64_t) { return 0; }), model);
        EXPECT(near(hidden.seconds, streams ? 5 : 7));  // MPI: it begins at the wait
        EXPECT(hidden.exposed.contains("world") == !streams);
        EXPECT(near(open.seconds, 7));
        EXPECT(near(open.exposed.at("world"), 2));
        EXPECT(hidden.simulated_ranks == 1);

        const SimulatedStep slow = simulate_step(recording_of(2, {}, {exposed}, [](int64_t) { return 0; }), model,
                                                 {.slow_ranks = {{1, 2.0}}, .traced = {0, 1}});
        EXPECT(slow.simulated_ranks == 2);
        EXPECT(near(slow.seconds, 2 + 2 + 8));
        EXPECT(near(slow.waiting.at("world"), 0.5));  // rank 0 waits for 1 s
        EXPECT(near(slow.waiting.at("end"), 2));
        expect_sound(slow);
    }
}

TEST_CASE("collectives of a group run in the order of the calls; those of two groups at once, or on one stream") {
    // tp of 1 s, then world of 2 s and tp of 1 s; waits for world first. tp and world have a link each.
    Script script;
    const int32_t first = script.collective(1, 10), second = script.collective(0, 20), third = script.collective(1, 10);
    script.wait(second).op(0.5).wait(third).wait(first);
    const Recording recording =
        recording_of(2, {family("tp", 2, [](int64_t) { return 0; })}, {script}, [](int64_t) { return 0; });
    SimulationModel model = plain_model(2, 2, 10, 10);
    model.links.assign(2, 10);
    model.transfer = [](const CommCall& call, const std::vector<int64_t>&, int64_t) {
        return Transfer{.loads = {{call.family, double(call.bytes)}}};
    };
    const SimulatedStep one = simulate_step(recording, model, {.traced = {1}, .stream_per_group = false});
    EXPECT(near(one.seconds, 4));  // the op beside the third
    EXPECT(near(one.exposed.at("tp"), 1 + 0.5));
    EXPECT(near(one.exposed.at("world"), 2));
    using Names = std::map<int, std::string>;
    EXPECT(one.stream_names == Names{{-1, "schedule"}, {0, "computation"}, {1, "communication"}});
    const SimulatedStep two = simulate_step(recording, model, {.traced = {1}});
    EXPECT(near(two.seconds, 2.5));
    EXPECT(near(two.exposed.at("world"), 2));
    EXPECT(!two.exposed.contains("tp"));
    EXPECT(two.stream_names ==
           Names{{-1, "schedule"}, {0, "computation"}, {2, "communication world"}, {3, "communication tp"}});
    for (const SimulatedStep& step : {one, two}) {
        REQUIRE(step.spans.size() == 5);
        expect_sound(step);
    }
}

TEST_CASE("an all-to-all to which ranks bring different bytes takes as long as the one with most") {
    // The rank with most is the first, the last or in the middle, and another one in the second call.
    for (const auto& [a, b, c] : {std::tuple(10, 20, 50), {50, 10, 20}, {20, 50, 10}, {50, 50, 50}, {0, 50, 0}}) {
        std::vector<Script> scripts;
        for (const int64_t bytes : {a, b, c}) {
            Script& script = scripts.emplace_back();
            script.wait(script.call({.operation = "all_to_all", .bytes = bytes, .uneven = true}));
            script.op(1).wait(script.call({.operation = "all_to_all", .bytes = 60 - bytes, .uneven = true}));
        }
        const Recording recording = recording_of(3, {}, scripts, [](int64_t rank) { return int(rank); });
        const double second = 60.0 - std::min({a, b, c});
        for (const bool symmetry : {true, false}) {
            const SimulatedStep step = simulate_step(recording, plain_model(3, 3, 10, 10, 0.5), {.symmetry = symmetry});
            INFO(a, " ", b, " ", c);
            EXPECT(near(step.seconds, 0.5 + 5 + 1 + 0.5 + second / 10));
        }
    }
}

TEST_CASE("equal groups that share a link slow each other down") {
    // Two nodes of four; dp groups across the nodes: four rings through each node's one link.
    Script script;
    script.wait(script.collective(1, 10));
    const Recording recording =
        recording_of(8, {family("dp", 8, [](int64_t r) { return int(r % 4); })}, {script}, [](int64_t) { return 0; });
    const SimulationModel model = plain_model(8, 4, 10, 20);
    const SimulatedStep step = simulate_step(recording, model);
    EXPECT(step.simulated_ranks == 1);
    EXPECT(near(step.seconds, 4 * 10 / 20.0));
    // One group on slower devices: it is not what limits, and then it is.
    expect_equal(simulate_step(recording, model, {.slow_links = {{0, 1.5}}}),
                 simulate_step(recording, model, {.slow_links = {{0, 1.5}}, .symmetry = false}));
    const SimulatedStep slow = simulate_step(recording, model, {.slow_links = {{0, 10.0}}});
    EXPECT(near(slow.seconds, 10));
    EXPECT(slow.simulated_ranks < 8);
    const SimulatedStep slow_node = simulate_step(recording, model, {.slow_links = {{8, 2.0}}});
    EXPECT(near(slow_node.seconds, 4));
}

TEST_CASE("the host launches ops one by one, and waits for numbers") {
    SimulationModel model = plain_model(1, 1, 1, 1);
    model.host_s = 2;
    Script script;
    script.op(1).op(1).op(10).op(1).op(1);  // launched at 2, 4, 6, 8, 10
    const auto alone = [&](Script s) {
        return simulate_step(recording_of(1, {}, {s}, [](int64_t) { return 0; }), model);
    };
    const SimulatedStep step = alone(script);
    EXPECT(near(step.seconds, 6 + 10 + 2));
    EXPECT(near(step.compute, 14));
    EXPECT(near(step.host, 4));
    Script number;  // a call is a launch too; the ops after it are launched when the number is there
    number.op(10);
    number.collective(0, 8, "scalar");
    number.op(1);
    EXPECT(near(alone(number).seconds, 12 + 8 + 2 + 1));
    model.streams = false;  // the host itself computes
    EXPECT(near(alone(script).seconds, 14 + 5 * 2));
}

TEST_CASE("a pipeline takes what chapter 05 says, for every schedule") {
    for (const ScheduleGenerator& generator : schedule_generators())
        for (const int64_t p : {1, 2, 3, 4, 8})
            for (const int64_t m : {1, 2, 4, 8, 12, 16, 24}) {
                if (generator.chunks == ScheduleGenerator::Chunks::loop && p == 1) continue;
                if (!generator.problem(p, m).empty()) continue;
                INFO(generator.name, ", ", p, " ranks, ", m, " micro-batches");
                const Schedule schedule = make_schedule(generator.name, p, m);
                const Costs costs = equal_costs(schedule, 1, 1.25, 0.5);
                const Timeline expected = simulate(schedule, costs);
                const Recording recording =
                    pipeline_recording(schedule, [&](const Step& step) { return costs.step(0, step); });
                SimulationModel model = plain_model(p, p, 1, 1);
                model.transfer = [](const CommCall&, const std::vector<int64_t>&, int64_t) { return Transfer{}; };
                for (const bool streams : {true, false}) {
                    model.streams = streams;
                    const SimulatedStep step = simulate_step(recording, model, {.traced = {p - 1}});
                    EXPECT(near(step.seconds, expected.total()));
                    EXPECT(std::abs(step.bubble - expected.bubble()) <= 1e-9);
                    expect_sound(step);
                }
            }
}

TEST_CASE("a rank stands for all that do the same: equal to the simulation of every rank") {
    int64_t fewer = 0;
    for (uint64_t seed = 0; seed < 300; ++seed) {
        const int64_t tp = 1 + int64_t(seed % 3), dp = 1 + int64_t(seed / 3 % 4), pp = 1 + int64_t(seed / 12 % 3);
        const int64_t ranks = tp * dp * pp, per_node = 1 + int64_t(random_bits(seed, 99) % 5);
        const Recording recording = random_recording(seed, tp, dp, pp);
        SimulationModel model = plain_model(ranks, per_node, 100, 150, 0.02);
        model.streams = seed % 5 > 1;
        if (model.streams && seed % 7 < 2) model.host_s = 0.05;
        if (!model.streams && seed % 2 == 0) model.cores = 1 + int64_t(random_bits(seed, 98) % 3);
        SimulationOptions options;
        options.stream_per_group = seed % 3 != 0;
        if (seed % 4 == 1) options.slow_ranks = {{int64_t(seed) % ranks, 3.0}};
        if (seed % 4 == 2) options.slow_links = {{int(seed % uint64_t(ranks)), 3.0}};
        INFO("seed ", seed, ": ", tp, " x ", dp, " x ", pp, ", ", per_node, " per node");
        const SimulatedStep one = simulate_step(recording, model, options);
        options.symmetry = false;
        for (int64_t rank = 0; rank < ranks; ++rank) options.traced.push_back(rank);
        const SimulatedStep all = simulate_step(recording, model, options);
        EXPECT(all.simulated_ranks == ranks);
        fewer += one.simulated_ranks < ranks;
        expect_equal(one, all);
        expect_sound(all);
        EXPECT(near(sum_of_parts(one), one.seconds));
    }
    EXPECT(fewer > 100);
}

TEST_CASE("a slow rank delays all, jitter is the seed's, and neither makes a step shorter than its longest rank") {
    const Recording recording = random_recording(5, 2, 2, 2);
    const SimulationModel model = plain_model(8, 4, 100, 150, 0.02);
    const double plain = simulate_step(recording, model).seconds;
    EXPECT(simulate_step(recording, model, {.slow_ranks = {{3, 1.5}}}).seconds > plain);
    const auto jittered = [&](uint64_t seed) {
        return simulate_step(recording, model, {.jitter = 0.1, .seed = seed}).seconds;
    };
    EXPECT(jittered(1) == jittered(1));
    EXPECT(jittered(1) != jittered(2));
    EXPECT(std::abs(jittered(1) / plain - 1) < 0.3);
    EXPECT(simulate_step(recording, model, {.jitter = 1e-9}).simulated_ranks == 8);
    EXPECT(near(simulate_step(recording, model, {.jitter = 1e-12}).seconds, plain, 1e-6));
    // Each op deviates on its own: 4 s in one op by 10%, in 100 ops by a tenth of that.
    for (const int64_t ops : {1, 100}) {
        Script script;
        for (int64_t i = 0; i < ops; ++i) script.op(4.0 / double(ops));
        const Recording alone = recording_of(1, {}, {script}, [](int64_t) { return 0; });
        double squares = 0;
        for (uint64_t seed = 0; seed < 500; ++seed) {
            const double seconds = simulate_step(alone, plain_model(1, 1, 1, 1), {.jitter = 0.1, .seed = seed}).seconds;
            squares += (seconds - 4) * (seconds - 4) / 500;
        }
        EXPECT(std::sqrt(squares) == doctest::Approx(0.4 / std::sqrt(double(ops))).epsilon(0.1).scale(0));
    }
}

TEST_CASE("ranks that share cores") {
    Script script;
    script.op(3);
    const Recording recording = recording_of(4, {}, {script}, [](int64_t) { return 0; });
    SimulationModel model = plain_model(4, 4, 1, 1);
    model.streams = false;
    for (const auto& [cores, seconds] : {std::pair(0, 3.0), {1, 12.0}, {2, 6.0}, {3, 4.0}, {4, 3.0}, {8, 3.0}}) {
        model.cores = cores;
        const SimulatedStep step = simulate_step(recording, model);
        EXPECT(near(step.seconds, seconds));
        EXPECT(step.simulated_ranks == 1);
    }
    // One rank has half as much to do and leaves its share to the others: 4 x 1.5 s on two cores, then 3 x 1.5 s.
    model.cores = 2;
    const SimulatedStep step = simulate_step(recording, model, {.slow_ranks = {{0, 0.5}}});
    EXPECT(near(step.seconds, 4 * 1.5 / 2 + 3 * 1.5 / 2));
    // Six ranks on nodes of four: four share the first one's core, two the second one's.
    model = plain_model(6, 4, 1, 1);
    model.streams = false;
    model.cores = 1;
    EXPECT(near(simulate_step(recording_of(6, {}, {script}, [](int64_t) { return 0; }), model).seconds, 4 * 3));
}

TEST_CASE("messages of a channel follow each other, and do not wait for collectives that were called before them") {
    Script sends, receives;  // an all-reduce of 10 s, and beside it two messages of 1 s over a link of their own
    sends.collective(0, 100);
    const CommCall receive{.family = 1, .operation = "recv", .bytes = 10, .from = 0, .channel = true};
    for (int i = 0; i < 2; ++i) sends.call({.family = 1, .operation = "send", .bytes = 10, .to = 1, .channel = true});
    receives.collective(0, 100);
    const int32_t first = receives.call(receive), second = receives.call(receive);
    receives.wait(first).op(7).wait(second);
    const Recording recording = recording_of(2, {family("pp", 2, [](int64_t) { return 0; })}, {sends, receives},
                                             [](int64_t rank) { return int(rank); });
    SimulationModel model = plain_model(2, 2, 10, 10);
    model.transfer = [](const CommCall& call, const std::vector<int64_t>&, int64_t) {
        return Transfer{.loads = {{call.channel ? 1 : 0, double(call.bytes)}}};
    };
    const SimulatedStep step = simulate_step(recording, model);
    EXPECT(near(step.seconds, 10));
    EXPECT(near(step.compute, 7 / 2.0));
    EXPECT(near(step.exposed.at("pp"), 1 / 2.0));  // rank 1 waits for the first message alone
}

TEST_CASE("a cluster's cores, and the launches of its host") {
    ClusterModel cluster;
    cluster.name = "by hand";
    cluster.device.measured["op"] = {1, 0};  // a FLOP per second
    cluster.nodes = 1, cluster.gpus_per_node = 4, cluster.rails = 1;
    cluster.host = {1, 0, "host"};
    cluster.cores = 2;
    cluster.device.streams = false;
    Script script;
    script.op(1).op(1).op(10).op(1).op(1);
    const Recording recording = recording_of(4, {}, {script}, [](int64_t) { return 0; });
    EXPECT(near(simulate_step(recording, cluster).seconds, 4 * 14 / 2.0));
    cluster.nodes = cluster.gpus_per_node = 2;  // each with its two cores
    cluster.rail = {1, 0, "network"};
    EXPECT(near(simulate_step(recording, cluster).seconds, 14));
    cluster.one_machine = true;
    EXPECT(near(simulate_step(recording, cluster).seconds, 4 * 14 / 2.0));
    cluster.cores = 0;
    EXPECT(near(simulate_step(recording, cluster).seconds, 14));
    cluster.device.host_s = 2;
    EXPECT(near(simulate_step(recording, cluster).seconds, 14 + 5 * 2));
    cluster.device.streams = true;  // the launches run ahead of the device
    EXPECT(near(simulate_step(recording, cluster).seconds, 6 + 10 + 2));
}

TEST_CASE("the report: per device, of the peak of the dtype, and the memory of the rank with most") {
    Script small, large;
    small.book(2'000'000'000).op(2);
    large.book(5'000'000'000).op(2);
    const Recording recording = recording_of(4, {}, {small, large}, [](int64_t rank) { return int(rank == 2); });
    const SimulatedStep step = simulate_step(recording, plain_model(4, 4, 1, 1));
    ClusterModel cluster;
    cluster.name = "by hand";
    cluster.device = {.name = "D", .peak_bf16 = 8e12, .peak_fp32 = 4e12, .memory_bytes = 4e9};
    for (const auto& [dtype, peak] : {std::pair(DType::bf16, 8e12), {DType::f32, 4e12}, {DType::f64, 2e12}}) {
        const StepWork work{4000, 8e12, dtype};
        EXPECT(near(tokens_per_s_per_gpu(step, work, 4), 4000 / 2.0 / 4));
        EXPECT(near(mfu(step, work, cluster, 4), 8e12 / 2 / 4 / peak));
    }
    const std::string text = step_table(step, recording, cluster, {4000, 8e12, DType::bf16}).text();
    INFO(text);
    EXPECT(text.find("2,000 tokens/s, 500 per device; MFU 12.5% of 8 TFLOP/s") != text.npos);
    EXPECT(text.find("peak memory 5.00 GB on rank 2, of the 4 GB of each D: it does not fit") != text.npos);
}

TEST_CASE("the memory of a traced rank, and the parts of its step") {
    Script script;
    script.book(100).part(Sequence::Part::Kind::setup);
    script.book(5).op(1).book(-5).book(7).op(2).part(Sequence::Part::Kind::schedule_step, {Pass::forward, 3});
    script.op(50).part(Sequence::Part::Kind::end);
    const Recording recording = recording_of(2, {}, {script}, [](int64_t) { return 0; });
    const SimulatedStep step = simulate_step(recording, plain_model(2, 2, 1, 1), {.traced = {0, 1}});
    EXPECT(near(step.seconds, 3));
    REQUIRE(step.memory.size() == 4);
    EXPECT(step.memory[0].now[int(Memory::activations)] == 105);
    EXPECT(step.memory[0].seconds == 0);
    EXPECT(step.memory[1].now[int(Memory::activations)] == 107);
    EXPECT(step.memory[1].seconds == 1);
    EXPECT(step.memory[2].rank == 1);
    EXPECT(std::count_if(step.spans.begin(), step.spans.end(), [](const SimulatedStep::Span& span) {
               return span.stream == -1 && span.name == "F3" && span.begin == 0 && near(span.end, 3);
           }) == 2);
    EXPECT(near(step.ops.at("op").seconds, 3));
    EXPECT(near(step.ops.at("op").calls, 2));
}

TEST_CASE("layouts of the grid: recorded, and simulated as classes and rank by rank") {
    const Text text;
    const ClusterModel gpus = read_cluster("08_3d_full/plan/clusters/h100-8x8.json", "cluster");
    ClusterModel cpus = read_cluster("08_3d_full/plan/clusters/cpu.json", "cluster");
    cpus.cores = 16;  // on fewer, rounding grows until equal ranks fall out of step (equal_ranks.h)
    const std::vector<GridLayout> layouts = grid_layouts();
    int64_t fewer = 0;
    for (size_t i = 0; i < layouts.size(); ++i) {
        if (!in_slice(int64_t(i)) || !in_sanitized_slice(int64_t(i) / 8)) continue;
        INFO(layouts[i].text());
        TrainOptions o = grid_shape(text);
        layouts[i].use_family(o.model, int64_t(i) % 3);
        o.model.tied = layouts[i].tied;
        o.recompute = layouts[i].recompute;
        ParallelConfig config = layouts[i].config();
        validate(config, o, config.mesh.size());
        const Recording recording = record_step(o, Dataset(o.data, o.model.vocab, o.seq_len, 0), config);
        for (const ClusterModel& cluster : {gpus, cpus}) {
            INFO(cluster.name);
            const SimulatedStep one = simulate_step(recording, cluster);
            SimulationOptions options{.symmetry = false};
            for (int64_t rank = 0; rank < recording.ranks; ++rank) options.traced.push_back(rank);
            const SimulatedStep all = simulate_step(recording, cluster, options);
            fewer += one.simulated_ranks < all.simulated_ranks;
            expect_equal(one, all);
            expect_sound(all);
            options.symmetry = true;
            options.slow_ranks = {{5, 2.0}};
            const SimulatedStep slow = simulate_step(recording, cluster, options);
            EXPECT(slow.seconds > one.seconds);
            options.symmetry = false;
            expect_equal(slow, simulate_step(recording, cluster, options));
        }
    }
    if (kThorough) EXPECT(fewer > 0);
}

TEST_CASE("what cannot be simulated is said in one line") {
    Script script;
    script.op(1);
    const Recording recording = recording_of(600, {}, {script}, [](int64_t) { return 0; });
    const SimulationModel model = plain_model(600, 8, 1, 1);
    EXPECT_USAGE_ERROR(simulate_step(recording, model, {.jitter = 0.1}), "jitter: 600 ranks");
    EXPECT_USAGE_ERROR(simulate_step(recording, model, {.jitter = 2}), "a jitter of 2");
    EXPECT_USAGE_ERROR(simulate_step(recording, model, {.slow_ranks = {{600, 2}}}), "slow rank 600");
    EXPECT_USAGE_ERROR(simulate_step(recording, model, {.slow_links = {{1000, 2}}}), "slow link 1000");
    EXPECT_USAGE_ERROR(simulate_step(recording, model, {.traced = {-1}}), "no rank -1");
    Script waits, passes;
    waits.wait(waits.call({.family = 0, .operation = "recv", .bytes = 1, .from = 1, .where = "x.cpp:1"}));
    passes.op(1);
    const Recording stuck = recording_of(2, {}, {waits, passes}, [](int64_t rank) { return int(rank); });
    DOCTEST_CHECK_THROWS_WITH_AS((void)simulate_step(stuck, plain_model(2, 2, 1, 1)),
                                 doctest::Contains("rank 0 calls world.recv #1 in update (x.cpp:1), but rank 1 sends"),
                                 CommonError);
}
