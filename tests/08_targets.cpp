// Ignored targets, mixtures and documents' ends in every layout: one rank's run, whichever rank has the targets; and
// runs that go on from a checkpoint with them.
#include "tests/checkpoints.h"
#include "tests/grid_layouts.h"
#include "tests/shards.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// Three sources: half of the targets ignored; all of them; and no masks.
struct Sources {
    SharedFolder folder;
    const std::string half = folder / "half.bin", none = folder / "none.bin", all = folder / "all.bin",
                      sparse = folder / "sparse.bin";

    Sources() {
        only_on_rank_0([&] {
            write_shard(half, random_tokens(3000, 1), random_mask(3000, 2));
            write_shard(none, random_tokens(900, 3), std::vector<uint8_t>(900, 0));
            write_shard(all, random_tokens(900, 4));
            std::vector<uint8_t> few(3000, 0);
            for (const size_t at : {200, 201, 777, 1500, 2900}) few[at] = 1;
            write_shard(sparse, random_tokens(3000, 5), few);
        });
    }
    std::string mixture() const { return fmt::format("{}:0.2,{}:0.45,{}:0.35", all, half, none); }
};

TrainOptions targets_shape(const std::string& data) {
    TrainOptions o = grid_shape(Text());
    o.data = data;
    o.global_batch = 8;
    o.steps = 5;
    o.dtype = o.grad_dtype = "fp64";
    o.val_fraction = 0.2;
    return o;
}

const std::vector<GridLayout> kMaskedLayouts = {
    {.mesh = {.dp = 8}},
    {.mesh = {.dp = 8}, .zero = 3},
    {.mesh = {.tp = 4, .dp = 2}, .zero = 1, .sequence = true},
    {.mesh = {.tp = 2, .cp = 2, .dp = 2}, .zero = 2, .context = "ring", .recompute = "full"},
    {.mesh = {.cp = 4, .dp = 2}, .zero = 3, .context = "ulysses"},
    {.mesh = {.tp = 8}, .sequence = true},
    {.mesh = {.cp = 8}, .context = "gather"},
    {.mesh = {.dp = 4, .pp = 2}, .zero = 1},
    {.mesh = {.dp = 2, .pp = 4}, .pipeline = "zero-bubble", .zero = 2},
    {.mesh = {.tp = 2, .dp = 2, .pp = 2}, .pipeline = "interleaved", .zero = 3, .recompute = "selective"},
    {.mesh = {.tp = 2, .cp = 2, .pp = 2}, .pipeline = "zero-bubble", .sequence = true},
};

// With the number of targets of each step.
Farthest farthest(const Session& a, const Session& b) {
    Farthest worst = worst_deviation(a, b);
    for (size_t i = 0; i < a.reports.size(); ++i)
        worst.add(a.reports[i].targets == b.reports[i].targets ? 0 : INFINITY, fmt::format("step {}, targets", i + 1));
    return worst;
}

// Of the steps' divisions over `ranks`: how many parts have no target, and how many steps have none.
std::pair<int64_t, int64_t> empty_parts(const TrainOptions& o, int64_t ranks) {
    const Dataset data(o.data, o.model.vocab, o.seq_len, o.val_fraction);
    const Batches batches(o, data);
    int64_t parts = 0, steps = 0;
    for (int64_t step = 1; step <= o.steps; ++step) {
        std::vector<int64_t> of_rank(static_cast<size_t>(ranks));
        int64_t all = 0;
        const std::vector<Sample> samples = batches.global_batch(step);
        for (size_t i = 0; i < samples.size(); ++i)
            for (const int32_t target : samples[i].targets)
                of_rank[i % size_t(ranks)] += target >= 0, all += target >= 0;
        for (const int64_t count : of_rank) parts += count == 0;
        steps += all == 0;
    }
    return {parts, steps};
}

}  // namespace

TEST_CASE("every layout is one rank's run, to 1e-10 in fp64, whichever rank and micro-batch has targets to predict") {
    REQUIRE(world().size() == 8);
    const Sources sources;
    int64_t number = 0;
    for (const bool documents : {false, true})
        for (const std::string& data : {sources.mixture(), sources.sparse}) {
            TrainOptions o = targets_shape(data);
            if (documents) o.document_token = 9, o.mask_document_ends = true;
            const auto [parts, steps] = empty_parts(o, 8);
            EXPECT(parts >= 6);  // ranks of dp 8 without a target of their own
            EXPECT((steps > 0) == (data == sources.sparse));
            EXPECT(steps < o.steps);
            std::unique_ptr<Session> one;
            bool first = true;
            double worst = 0;
            for (const GridLayout& layout : kMaskedLayouts) {
                const int64_t at = number++;
                if (!in_slice(at) || !in_sanitized_slice(at / 8)) continue;
                if (std::exchange(first, false)) one = run_on_one_rank(o);
                o.recompute = layout.recompute;
                ComposedRun run(o, world(), layout.config());
                run.session.run();
                const Farthest deviation = one ? farthest(run.session, *one) : Farthest();
                INFO(layout.text(), ", documents ", documents, ": ", deviation);
                EXPECT_EVERYWHERE(deviation <= 1e-10);
                worst = std::max(worst, double(deviation));
                const double loss = evaluate(run.session.trainer);
                double expected = 0;
                only_on_rank_0([&] { expected = evaluate(one->trainer); });
                EXPECT_EVERYWHERE(this_rank != 0 || std::abs(loss / expected - 1) <= 1e-10);
            }
            if (this_rank == 0) fmt::print("ignored targets: the farthest layout from one rank's run: {:.1e}\n", worst);
        }
}

TEST_CASE("a message more where targets can be ignored: one number; none otherwise") {
    const Sources sources;
    std::map<std::string, int64_t> bytes[2];
    for (const bool masked : {false, true}) {
        TrainOptions o = targets_shape(masked ? sources.half : sources.all);
        o.steps = 2;
        std::optional<StepStats> stats;
        ComposedRun run(o, world(), GridLayout{.mesh = {.tp = 2, .cp = 2, .dp = 2}}.config());
        stats.emplace(world());
        run.session.trainer.runtime = &*stats;
        run.session.run();
        for (const auto& [name, entry] : stats->sent) bytes[masked][name] = entry.bytes;
        EXPECT_EVERYWHERE(run.session.reports[0].targets.has_value() == masked);
    }
    EXPECT_EVERYWHERE(bytes[0].size() == bytes[1].size());
    for (const auto& [name, count] : bytes[0]) {
        const bool more = name == "dp_cp.scalar";
        INFO(name);
        EXPECT_EVERYWHERE(bytes[1][name] - count == (more ? 8 * 2 * 3 / 4 : 0));  // a ring's, over four ranks
    }
}

TEST_CASE("resumed at any step: bit for bit in the same layout, and the same run on any dp") {
    const Sources sources;
    TrainOptions o = targets_shape(sources.mixture());
    o.document_token = 9;
    o.mask_document_ends = true;
    const ParallelConfig first = GridLayout{.mesh = {.tp = 2, .dp = 2, .pp = 2}, .zero = 1}.config();
    const ParallelConfig second = GridLayout{.mesh = {.dp = 8}, .zero = 3}.config();
    const std::vector<double> all = history_of(o, first, {});
    int64_t number = 0;
    for (const int64_t stop : {1, 3, 4}) {
        if (!in_half(number++)) continue;
        const SharedFolder shared;
        const std::vector<double> begun = history_of(o, first, {.dir = shared / "d", .stop_after = stop});
        EXPECT_EVERYWHERE(begun == std::vector<double>(all.begin(), all.begin() + 2 * stop));
        const std::vector<double> elsewhere =
            history_of(o, second, {.resume_from = shared / fmt::format("d/step-{}", stop)});
        const std::vector<double> rest = history_of(o, first, {.dir = shared / "d", .resume = true});
        EXPECT_EVERYWHERE(rest == std::vector<double>(all.begin() + 2 * stop, all.end()));
        bool near = elsewhere.size() == rest.size();
        for (size_t i = 0; near && i < rest.size(); ++i) near = std::abs(elsewhere[i] / rest[i] - 1) <= 1e-10;
        EXPECT_EVERYWHERE(near);
    }
}

TEST_CASE("refused: going on with other weights, without the masks, or with other ones") {
    const Sources sources;
    const SharedFolder shared;
    const TrainOptions o = targets_shape(sources.mixture());
    const ParallelConfig config = GridLayout{.mesh = {.dp = 8}}.config();
    history_of(o, config, {.dir = shared / "d", .stop_after = 2});
    const auto refused = [&](const std::string& data) {
        TrainOptions other = o;
        other.data = data;
        EXPECT_USAGE_ERROR(history_of(other, config, {.resume_from = shared / "d/step-2"}),
                           "is not the data of the checkpoint");
    };
    refused(fmt::format("{}:0.4,{}:0.4,{}:0.2", sources.half, sources.none, sources.all));
    refused(fmt::format("{1}:0.35,{0}:0.45,{2}:0.2", sources.half, sources.none, sources.all));
    refused(fmt::format("{}:0.5,{}:0.5", sources.half, sources.none));
    refused(sources.half);
    const std::string mask = mask_path(sources.half), aside = mask + ".aside";
    only_on_rank_0([&] { std::filesystem::rename(mask, aside); });
    refused(sources.mixture());
    only_on_rank_0([&] { write_shard(sources.half, random_tokens(3000, 1), random_mask(3000, 77)); });
    refused(sources.mixture());
    only_on_rank_0([&] { std::filesystem::rename(aside, mask); });
    EXPECT_EVERYWHERE(history_of(o, config, {.resume_from = shared / "d/step-2"}).size() == 2 * 3);
}
