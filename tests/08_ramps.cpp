// --batch-ramp and --seq-ramp in every layout: one rank's run, also where it is resumed in the middle of a ramp; a
// batch that changes where a run is resumed; and continuations of a prompt, which are the same in every layout.
#include "08_3d_full/watch/ramps.h"
#include "tests/checkpoints.h"
#include "tests/grid_layouts.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// 4, 8, 12, 16, 16 sequences of 8, 8, 16, 16, 32 tokens, cut from samples of 32.
const Ramps kRamps = {.batch = {4, 16, 3}, .seq = {8, 32, 4}};

TrainOptions ramped_shape(const Text& text) {
    TrainOptions o = grid_shape(text);
    o.dtype = o.grad_dtype = "fp64";
    o.steps = 5;
    o.step_sizes = std::make_shared<RampedSizes>(o.global_batch, o.seq_len, kRamps);
    return o;
}

// Added up step by step, unlike ChangedSizes.
struct Changing : StepSizes {
    Changing() : StepSizes(16, 32) {}
    int64_t samples(int64_t step) const override { return step <= 2 ? 16 : step <= 5 ? 8 : 12; }
    int64_t first_sample(int64_t step) const override {
        return step == 1 ? 0 : first_sample(step - 1) + samples(step - 1);
    }
    double position(int64_t step) const override {
        return step == 0 ? 0 : position(step - 1) + double(samples(step)) / 16;
    }
};

const std::vector<GridLayout> kRampedLayouts = {
    {.mesh = {.dp = 4, .pp = 2}, .zero = 2},
    {.mesh = {.tp = 2, .cp = 4}, .sequence = true},
    {.mesh = {.tp = 2, .cp = 2, .pp = 2}, .zero = 3, .context = "ulysses"},
    {.mesh = {.dp = 2, .pp = 4}, .pipeline = "zero-bubble"},
    {.mesh = {.tp = 2, .dp = 2, .pp = 2}, .pipeline = "interleaved", .sequence = true},
    {.mesh = {.tp = 2, .dp = 2, .pp = 2}, .pipeline = "zb-v", .zero = 1},
};

}  // namespace

TEST_CASE("every layout is one rank's run through both ramps") {
    const Text text;
    const TrainOptions o = ramped_shape(text);
    std::unique_ptr<Session> one;
    only_on_rank_0([&] {
        TrainOptions alone = o;
        alone.micro_batch = 4;
        one = std::make_unique<Session>(alone);
        one->run();
    });
    int64_t number = 0;
    for (const GridLayout& layout : kRampedLayouts) {
        if (!in_half(number++) || !in_sanitized_slice(number / 2)) continue;
        ComposedRun run(o, world(), layout.config());
        check_ramps(kRamps, o, run.config);
        run.session.run();
        const Farthest deviation = one ? worst_deviation(run.session, *one) : Farthest();
        INFO(layout.text(), ": ", deviation);
        EXPECT_EVERYWHERE(deviation <= 1e-10);
        EXPECT_EVERYWHERE(run.session.reports[1].size->sequences == 8 * 4);
        EXPECT_EVERYWHERE(run.session.reports[1].size->seq_len == 8);
        EXPECT_EVERYWHERE(run.session.reports[4].size->sequences == 16);
    }
}

TEST_CASE("a run resumed in the middle of the ramps is the uninterrupted one, in its own layout bit for bit") {
    const Text text;
    const TrainOptions o = ramped_shape(text);
    const SharedFolder shared;
    const std::vector<double> all = history_of(o, kRampedLayouts[0].config(), {});
    history_of(o, kRampedLayouts[0].config(), {.dir = shared / "d", .stop_after = 2});
    const std::vector<double> rest(all.begin() + 4, all.end());
    const std::string start = shared / "d/step-2";
    EXPECT_EVERYWHERE(history_of(o, kRampedLayouts[0].config(), {.resume_from = start}) == rest);
    const std::vector<double> other = history_of(o, kRampedLayouts[1].config(), {.resume_from = start});
    REQUIRE(other.size() == rest.size());
    for (size_t i = 0; i < rest.size(); ++i) EXPECT_EVERYWHERE(std::abs(other[i] / rest[i] - 1) <= 1e-10);
}

TEST_CASE("a run resumed with another batch, twice, is the one whose batch changes there") {
    const Text text;
    TrainOptions o = ramped_shape(text), changing = o;
    changing.steps = 9;  // 2 of 16, 3 of 8, 4 of 12: 104 samples
    o.min_lr = changing.min_lr = 1e-4;
    o.warmup_steps = changing.warmup_steps = 3;  // half way through the steps of 8
    changing.step_sizes = std::make_shared<Changing>();
    const ParallelConfig config = kRampedLayouts[0].config();
    const SharedFolder shared;
    std::vector<double> found;
    const auto add = [&](int64_t batch, int64_t steps, const CheckpointOptions& c) {
        o.global_batch = batch;
        o.steps = steps;
        o.step_sizes = nullptr;
        const std::vector<double> part = history_of(o, config, c);
        found.insert(found.end(), part.begin(), part.end());
    };
    const std::string dir = shared / "d";
    add(16, 6, {.dir = dir, .stop_after = 2});
    add(8, 11, {.dir = dir, .resume = true, .stop_after = 4});
    add(8, 11, {.dir = dir, .resume = true, .stop_after = 5});  // interrupted once more
    add(12, 9, {.dir = dir, .resume = true});
    const std::vector<double> expected = history_of(changing, config, {});
    EXPECT_EVERYWHERE(found == expected);
    const nlohmann::json manifest = *read_manifest(shared / "d/step-9").json;
    EXPECT_EVERYWHERE(manifest["next_sample"] == 2 * 16 + 3 * 8 + 4 * 12);
    EXPECT_EVERYWHERE(manifest["batches"].dump() == R"([{"from_step":1,"global_batch":16},)"
                                                    R"({"from_step":3,"global_batch":8},)"
                                                    R"({"from_step":6,"global_batch":12}])");
    const std::vector<double> other = history_of(o, kRampedLayouts[1].config(), {.resume_from = shared / "d/step-5"});
    REQUIRE(other.size() == 8);
    for (size_t i = 0; i < 8; ++i) EXPECT_EVERYWHERE(std::abs(other[i] / expected[10 + i] - 1) <= 1e-12);
}

TEST_CASE("a continuation of a prompt is the same in every layout, and on one rank") {
    const Text text;
    TrainOptions o = ramped_shape(text);
    o.step_sizes = nullptr;
    o.steps = 2;
    const auto one = run_on_one_rank(o);
    std::vector<double> expected(64);
    only_on_rank_0([&] {
        const std::vector<int32_t> tokens = generate(one->trainer, 48);  // beyond the context of 32
        expected.assign(tokens.begin(), tokens.end());
    });
    expected.resize(64);
    expected = world().sum(expected);
    int64_t number = 0;
    for (const GridLayout& layout : kRampedLayouts) {
        if (!in_quarter(number++)) continue;
        ComposedRun run(o, world(), layout.config());
        run.session.run();
        const std::vector<int32_t> tokens = generate(run.session.trainer, 48);
        INFO(layout.text());
        EXPECT_EVERYWHERE(std::vector<double>(tokens.begin(), tokens.end()) == expected);
    }
}

TEST_CASE("ramps that do not divide are refused with what would work") {
    const Text text;
    TrainOptions o = ramped_shape(text);
    Ramps ramps = kRamps;
    const auto check = [&](TrainOptions o, ParallelConfig config) {
        validate(config, o, world().size());
        check_ramps(ramps, o, config);
    };
    const ParallelConfig data{.mesh = {.dp = 8}}, context{.mesh = {.cp = 8}};
    EXPECT_USAGE_ERROR(
        check(o, data),
        "--batch-ramp 4:16:3: the batch grows in multiples of 4, which is not divisible by --micro-batch "
        "1 x 8 data-parallel ranks (try FROM and TO that are multiples of 8)");
    EXPECT_USAGE_ERROR(check(o, context), "--seq-ramp 8:32:4: pieces of 8 tokens are not divisible by 16 (--cp 8");
    ramps.seq.to = 64;
    EXPECT_USAGE_ERROR(check(o, {.mesh = {.dp = 2, .pp = 4}}),
                       "--seq-ramp 8:64:4: must end at --seq-len 32 (try --seq-ramp 8:32:4, or --seq-len 64)");
    ramps.seq = {12, 32, 4};
    EXPECT_USAGE_ERROR(check(o, {.mesh = {.dp = 2, .pp = 4}}), "TO is not divisible by FROM (try 4:32:4)");
    ramps.seq = {};
    ramps.batch = {4, 16, 3};
    ParallelConfig interleaved{.mesh = {.dp = 4, .pp = 2}};
    interleaved.pipeline.schedule = "interleaved";
    EXPECT_USAGE_ERROR(check(o, interleaved), "a batch of 4 sequences is 1 micro-batches, and --pipeline interleaved");
    interleaved.pipeline.schedule = "dualpipe-v";
    EXPECT_USAGE_ERROR(check(o, interleaved), "and --pipeline dualpipe-v needs 4 on --pp 2 (try FROM 16)");
    const std::string file = text.folder / "four.txt";
    write_text(file, "F0 B0 F1 B1 F2 B2 F3 B3\nF0 B0 F1 B1 F2 B2 F3 B3\n");
    interleaved.pipeline.schedule = "file:" + file;
    EXPECT_USAGE_ERROR(check(o, interleaved), "four.txt is for one number of micro-batches (try a schedule by name)");
    interleaved.pipeline.schedule = "1f1b";
    o.save_reference = "ref";
    EXPECT_USAGE_ERROR(check(o, {.mesh = {.dp = 4, .pp = 2}}), "leave out --batch-ramp");
}
