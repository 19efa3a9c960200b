// Experts in every layout: divided by ep or not, beside all other techniques, against one rank. Also what they send.
#include "08_3d_full/checkpoint/snapshot.h"
#include "08_3d_full/plan/dry_run.h"
#include "08_3d_full/plan/record.h"
#include "tests/checkpoints.h"
#include "tests/composed.h"
#include "tests/drawn_layouts.h"
#include "tests/grid_layouts.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// Routers, balancing losses, capacities and shared experts go round the layouts.
void use_experts(TrainOptions& o, int64_t number) {
    ExpertsConfig& x = o.model.experts;
    x = {.count = 8, .top_k = 2, .ffn = 16};
    x.shared = number % 2 * 2;
    x.dense_layers = number % 5 == 2 ? 1 : 0;
    x.sigmoid = number % 3 == 1;
    x.normalize = number % 4 != 3;
    x.scale = number % 4 == 3 ? 2.5 : 1;
    if (number % 6 == 4) x.groups = 4, x.top_groups = 2;
    x.capacity_factor = number % 3 == 0 ? 1.25 : 0;
    x.balance = {
        .aux_loss = 0.05, .of_batch = number % 4 >= 2, .z_loss = number % 2 * 0.01, .bias_rate = x.sigmoid ? 0.01 : 0};
}

// A layout of the parity grid with experts, over ep ranks.
ParallelConfig with_experts(const GridLayout& layout, int64_t ep) {
    ParallelConfig config = layout.config();
    config.mesh.ep = ep;
    config.tensor.sequence_parallel = config.mesh.tp > 1;
    if (ep == 1 && config.mesh.tp == 1) return config;
    config.zero.hybrid_shard = 0;  // they are refused
    config.zero.offload = Offload::none;
    return config;
}

// How far a row was from another choice of experts: the smallest difference of the scores of the last that was chosen
// and the first that was not. Without groups.
struct Margin {
    double smallest = INFINITY;

    void watch(Llama& model) {
        if (model.config.experts.groups > 1) return;
        for (Block& block : model.blocks) {
            Experts* experts = experts_of(block);
            if (!experts) continue;
            experts->on_logits = [this, experts, shape = model.config.experts.router()](const Tensor& logits) {
                add(read(logits), experts->bias(), shape);
            };
        }
    }
    void add(const std::vector<double>& logits, const std::vector<float>& bias, const RouterShape& shape) {
        const size_t N = size_t(shape.experts);
        for (size_t row = 0; row < logits.size(); row += N) {
            std::vector<double> scores;
            double sum = 0;
            for (size_t e = 0; e < N; ++e) {
                scores.push_back(shape.sigmoid ? 1 / (1 + std::exp(-logits[row + e])) : std::exp(logits[row + e]));
                sum += scores.back();
            }
            for (size_t e = 0; e < N; ++e)
                scores[e] = scores[e] / (shape.sigmoid ? 1 : sum) + (bias.empty() ? 0 : double(bias[e]));
            std::sort(scores.rbegin(), scores.rend());
            smallest = std::min(smallest, scores[size_t(shape.top_k - 1)] - scores[size_t(shape.top_k)]);
        }
    }
};

// One rank's run and the smallest margin in it.
std::unique_ptr<Session> sparse_on_one_rank(const TrainOptions& o, Margin& margin) {
    return run_on_one_rank(o, [&](Session& s) { margin.watch(s.model); });
}

}  // namespace

TEST_CASE("experts' ranks: ep consecutive ones of a stage, edp those with the same index") {
    const Mesh mesh{.tp = 2, .cp = 1, .dp = 4, .pp = 2, .ep = 4};
    const EpColors colors = ep_colors(mesh);
    for (int rank = 0; rank < 16; ++rank)
        for (int other = 0; other < 16; ++other) {
            EXPECT((colors.ep(rank) == colors.ep(other)) == (rank / 4 == other / 4));
            EXPECT((colors.edp(rank) == colors.edp(other)) == (rank / 8 == other / 8 && rank % 4 == other % 4));
        }
    const Text text;
    TrainOptions o = grid_shape(text);
    const auto refuses = [&](const ParallelConfig& asked, const char* why) {
        ParallelConfig config = asked;
        EXPECT_USAGE_ERROR(validate(config, o, 16), why);
    };
    refuses({.mesh = {.dp = 16, .ep = 2}}, "--ep 2: needs a model with experts");
    use_experts(o, 1);
    refuses({.mesh = {.dp = 16, .ep = 16}}, "must divide --experts 8 and the 16 ranks of a stage");
    refuses({.mesh = {.dp = 16, .ep = 3}}, "(try 2)");
    refuses({.mesh = {.tp = 2, .dp = 8}}, "--experts 8 with --tp 2: needs --sequence-parallel on");
    refuses({.mesh = {.dp = 16, .ep = 2}, .zero = {.stage = 3, .hybrid_shard = 4}}, "--hybrid-shard 4: not supported");
    refuses({.mesh = {.dp = 16, .ep = 2}, .zero = {.stage = 2, .offload = Offload::optimizer}}, "--offload");
    o.model.experts.shared = 1;
    o.model.experts.ffn = 18;
    refuses({.mesh = {.tp = 4, .dp = 4}, .tensor = {.sequence_parallel = true}}, "--shared-experts 1");
}

// In fp32 a choice may differ where two scores are closer than their rounding; from there on it is another run. So one
// step is compared, if no margin is below 1e-5.
TEST_CASE("experts in the parity grid, ep 1, 2, 4 and 8: one rank's run, to 1e-10 in fp64; every fourth in fp32") {
    const Text text;
    REQUIRE(world().size() == 16);
    for (const Parity& parity : kParity) {
        const bool wide = parity.bound == 1e-10;
        int64_t number = 0, count = 0;
        double worst = 0;
        Margin margin;
        for (const GridLayout& layout : grid_layouts()) {
            const int64_t at = number++;
            if (parity.skips(at) || !in_slice(at / parity.each)) continue;
            TrainOptions o = grid_shape(text);
            o.steps = !wide ? 1 : all_slices() ? 20 : 3;
            o.dtype = parity.dtype;
            layout.use_family(o.model, at / 4 % 3);
            o.recompute = layout.recompute;
            use_experts(o, at);
            ParallelConfig config =
                with_experts(layout, std::min(int64_t(1) << (at + at / 4) % 4, layout.mesh.stage_ranks()));
            Margin its;
            const auto one = sparse_on_one_rank(o, its);
            ComposedRun run(o, world(), config);
            run.session.run();
            EXPECT_EVERYWHERE(run.books_its_formulas());
            margin.smallest = std::min(margin.smallest, its.smallest);
            if (!wide && world().sum(one && its.smallest < 1e-5 ? 1 : 0) > 0) continue;
            const Farthest deviation = deviation_on_rank_0(run.session, one);
            INFO(o.dtype, ", layout ", at, ", ep ", config.mesh.ep, ", ", layout.text(), ": ", deviation);
            EXPECT_EVERYWHERE(deviation <= parity.bound);
            if (one && wide) expect_equal_loads(run.session, *one);
            worst = std::max(worst, double(deviation));
            ++count;
        }
        if (world().rank() == 0)
            fmt::print("{}: {} layouts with experts, the farthest by {:.1e}; the smallest margin of a choice {:.1e}\n",
                       parity.dtype, count, worst, margin.smallest);
        if (wide) EXPECT(count >= (all_slices() ? 40 : 4));
    }
}

TEST_CASE("random layouts with experts in fp64: one rank's run, to 1e-10") {
    const Text text;
    double worst = 0;
    int64_t count = 0;
    Margin margin;
    for (int64_t number = 0; number < 30; ++number) {
        if (!in_slice(number) || (!kThorough && number >= 8)) continue;
        std::unique_ptr<ComposedRun> run;
        Drawn drawn;
        for (uint64_t attempt = 0; !run; ++attempt) {
            REQUIRE(attempt < 400);
            drawn = draw(text, world().size(), uint64_t(100 + number), attempt);
            TrainOptions& o = drawn.options;
            if (!all_slices()) o.steps = std::min<int64_t>(o.steps, 4);
            Dice dice(uint64_t(500 + number), attempt);
            use_experts(o, dice.below(60));
            o.model.experts.count = dice.one_of({4, 8, 16});
            o.model.experts.top_k = dice.one_of({1, 2, 3});
            o.model.experts.ffn = dice.one_of({8, 13, 24});
            // The one weight of a row would be 1, and the router's gradient nothing but rounding.
            if (o.model.experts.top_k == 1) o.model.experts.normalize = false;
            drawn.config.mesh.ep = dice.one_of({1, 2, 4, 8, 16});
            drawn.config.tensor.sequence_parallel = drawn.config.mesh.tp > 1;
            try {
                check_config(o.model);
                run = std::make_unique<ComposedRun>(o, world(), drawn.config);
            } catch (const UsageError&) {}
        }
        run->session.run();
        Margin its;
        const auto one = sparse_on_one_rank(drawn.options, its);
        const Farthest deviation = deviation_on_rank_0(run->session, one);
        INFO("layout ", number, ": ", drawn.text(), ": ", deviation);
        EXPECT_EVERYWHERE(deviation <= 1e-10);
        if (one) expect_equal_loads(run->session, *one);
        worst = std::max(worst, double(deviation));
        margin.smallest = std::min(margin.smallest, its.smallest);
        ++count;
    }
    if (world().rank() == 0)
        fmt::print("{} random layouts with experts, the farthest by {:.1e}; the smallest margin {:.1e}\n", count, worst,
                   margin.smallest);
    EXPECT(count > 0);
}

TEST_CASE("a router of equal rows: the lower experts on every rank, and the bytes of that load") {
    const Text text;
    TrainOptions o = grid_shape(text);
    o.dtype = "fp64";
    o.steps = 1;
    o.model.experts = {.count = 8, .top_k = 2, .ffn = 16};
    const auto ties = [](Llama& model) {
        for (Block& block : model.blocks)
            if (Experts* experts = experts_of(block)) experts->router.init_std = 0;  // all elements are 1
    };
    const auto one = run_on_one_rank(o, [&](Session& s) { ties(s.model); });
    for (const char* recompute : {"none", "full"}) {
        o.recompute = recompute;
        for (const Mesh& mesh : {Mesh{.dp = 16, .ep = 4}, Mesh{.tp = 2, .cp = 2, .dp = 4, .ep = 8}}) {
            ParallelConfig config;
            config.mesh = mesh;
            config.tensor.sequence_parallel = mesh.tp > 1;
            validate(config, o, 16);
            std::unique_ptr<Composed> composed;
            Session session(o, [&](Session& s) {
                ties(s.model);
                composed = std::make_unique<Composed>(s.model, s.trainer, o, config, world());
            });
            world().take_stats();
            session.run();
            const auto stats = world().take_stats().operations;
            EXPECT_EVERYWHERE(deviation_on_rank_0(session, one) <= 1e-10);
            if (one) EXPECT(experts_of(session.reports[0])->max_over_mean == 4);
            // Dispatch sends the rows of others' experts, combine the rows of others to them; so their gradients.
            const Comm& ep = composed->ranks.ep;
            const size_t mine = size_t(8 / ep.size());  // experts of a rank
            double rows = 0;
            for (const Block& block : session.model.blocks) {
                const std::vector<double> loads = ep.gather(experts_of(block)->loads.slots);
                for (size_t rank = 0; rank < size_t(ep.size()); ++rank)
                    for (size_t e = 0; e < 8; ++e) {
                        const bool is_here = e / mine == size_t(ep.rank()), is_mine = rank == size_t(ep.rank());
                        if (is_here != is_mine) rows += loads[rank * 8 + e];
                    }
            }
            const int64_t bytes = int64_t(rows) * 32 * 8 * (o.recompute == "full" ? 3 : 2);
            EXPECT_EVERYWHERE(ep.max(rows) >= 3 * 4 * double(o.global_batch * o.seq_len / 16));
            INFO(mesh.text(), " ", recompute);
            EXPECT_EVERYWHERE(stats.at("ep.all_to_all").bytes == bytes);
        }
    }
}

TEST_CASE("bytes of an even load are the formula's") {
    struct Bytes : RunControl {
        std::map<std::string, int64_t> of_step;
        void complete(StepReport& report) override { of_step = report.comm_bytes; }
    };
    const Text text;
    for (const char* recompute : {"none", "full"})
        for (const Mesh& mesh : {Mesh{.dp = 16, .ep = 2}, Mesh{.tp = 2, .cp = 2, .dp = 2, .pp = 2, .ep = 4}}) {
            TrainOptions o = grid_shape(text);
            use_experts(o, 3);
            o.model.experts.capacity_factor = 0;
            o.recompute = recompute;
            ParallelConfig config;
            config.mesh = mesh;
            config.tensor.sequence_parallel = mesh.tp > 1;
            validate(config, o, 16);
            only_on_rank_0([&] {
                const Dataset data(o.data, o.model.vocab, o.seq_len, o.val_fraction);
                Bytes bytes;
                run_meta_step(
                    o, nlohmann::ordered_json::object(), data, config, 5,
                    [&](Trainer& trainer) { trainer.controls.push_back(&bytes); }, [](const Trainer&) {});
                const int64_t runs = 4 / mesh.pp * o.accumulation(mesh.dp), rows = o.seq_len / (mesh.tp * mesh.cp);
                EXPECT(bytes.of_step.at("ep.all_to_all") ==
                       runs * expert_traffic(o.model, mesh.ep, rows, DType::f32, recompute_of(recompute)));
            });
        }
}

TEST_CASE("a dry run of all ranks, of which it runs some, has every rank's own peaks") {
    const Text text;
    for (const int zero : {1, 3}) {
        TrainOptions o = grid_shape(text);
        use_experts(o, 7);  // 16 slots of a rank on 12 experts: some get two
        o.model.experts.count = 12;
        o.model.experts.groups = o.model.experts.top_groups = 1;
        o.model.experts.dense_layers = 1;
        ParallelConfig config;
        config.mesh = {.tp = 2, .cp = 2, .dp = 2, .pp = 2, .ep = 4};
        config.zero.stage = zero;
        config.tensor.sequence_parallel = true;
        validate(config, o, 16);
        Failures failures;
        only_on_rank_0([&] {
            const Dataset data(o.data, o.model.vocab, o.seq_len, o.val_fraction);
            const Recording recording = record_step(o, data, config, {.most_ranks = 1});
            for (int64_t rank = 0; rank < 16; ++rank) {
                const MemoryPeak own = book_rank(o, nlohmann::ordered_json::object(), data, config, rank).peak;
                const MemoryPeak found = peak_of(recording.of(rank));
                failures.expect(own.total == found.total && own.kind == found.kind,
                                fmt::format("ZeRO {}, rank {}: {} and {} bytes", zero, rank, found.total, own.total));
            }
        });
        EXPECT_NONE(failures);
    }
}

TEST_CASE("checkpoints of experts: ep 4, then ep 2 and tp 2, then a pipeline, with their biases and fractions") {
    const Text text;
    TrainOptions o = grid_shape(text);
    o.dtype = o.grad_dtype = "fp64";
    o.steps = 6;
    use_experts(o, 1);  // a sigmoid
    o.model.experts.balance = {.aux_loss = 0.05, .of_batch = true, .bias_rate = 0.05};
    const auto one = run_on_one_rank(o);
    const auto layout = [](const Mesh& mesh, int zero) {
        ParallelConfig config;
        config.mesh = mesh;
        config.zero.stage = zero;
        config.tensor.sequence_parallel = mesh.tp > 1;
        return config;
    };
    const SharedFolder shared;
    std::vector<double> found = history_of(o, layout({.dp = 16, .ep = 4}, 0), {.dir = shared / "d", .stop_after = 2});
    const auto go_on = [&](const ParallelConfig& config, int64_t stop) {
        for (const double x : history_of(o, config, {.dir = shared / "d", .resume = true, .stop_after = stop}))
            found.push_back(x);
    };
    go_on(layout({.tp = 2, .dp = 8, .ep = 2}, 2), 4);
    go_on(layout({.tp = 2, .dp = 4, .pp = 2, .ep = 8}, 3), 6);
    double apart = 0;
    if (one) {
        const std::vector<double> expected = one->history();
        REQUIRE(found.size() == expected.size());
        for (size_t i = 0; i < found.size(); ++i) apart = std::max(apart, std::abs(found[i] / expected[i] - 1));
    }
    EXPECT_EVERYWHERE(apart <= 1e-10);

    // The same layout: bit for bit. And a run of another model is refused.
    const ParallelConfig same = layout({.tp = 2, .dp = 8, .ep = 4}, 1);
    const std::vector<double> all = history_of(o, same, {});
    std::vector<double> halves = history_of(o, same, {.dir = shared / "e", .stop_after = 3});
    for (const double x : history_of(o, same, {.dir = shared / "e", .resume = true})) halves.push_back(x);
    EXPECT_EVERYWHERE(halves == all);
    o.steps = 8;
    o.model.experts.top_k = 3;
    EXPECT_USAGE_ERROR(history_of(o, same, {.dir = shared / "e", .resume = true}), "its --top-k is 2");
}
