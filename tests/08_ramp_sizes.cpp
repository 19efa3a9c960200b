// --batch-ramp and --seq-ramp: the sizes of every step, and the tokens that are trained on.
#include "01_single_gpu/core/registry.h"
#include "08_3d_full/checkpoint/folder.h"
#include "08_3d_full/watch/ramps.h"
#include "tests/training.h"

using namespace train70b;
using namespace train70b::test;

namespace {
std::vector<int32_t> numbers_of(const Tensor& x) { return {x.data<int32_t>(), x.data<int32_t>() + x.size()}; }
}  // namespace

TEST_CASE("sizes: linear, rounded down to what is allowed, and the last ones from then on") {
    const RampedSizes batch(16, 64, {{4, 16, 6}, {}});  // 4, 6, 8, 10, 12, 14 before rounding to multiples of 4
    std::vector<int64_t> samples, first;
    for (int64_t step = 1; step <= 8; ++step) {
        samples.push_back(batch.samples(step));
        first.push_back(batch.first_sample(step));
        EXPECT(batch.seq_len(step) == 64);
    }
    EXPECT(samples == std::vector<int64_t>{4, 4, 8, 8, 12, 12, 16, 16});
    EXPECT(first == std::vector<int64_t>{0, 4, 8, 16, 24, 36, 48, 64});
    EXPECT(batch.tokens_until(9) == 80 * 64);

    const RampedSizes seq(16, 48, {{}, {8, 48, 5}});  // 8, 16, 24, 32, 40 before rounding to 8, 16, 24, 48
    std::vector<int64_t> lengths;
    for (int64_t step = 1; step <= 7; ++step) {
        lengths.push_back(seq.seq_len(step));
        EXPECT(seq.sequences(step) * seq.seq_len(step) == 16 * 48);
        EXPECT(seq.first_sample(step) == 16 * (step - 1));
    }
    EXPECT(lengths == std::vector<int64_t>{8, 16, 24, 24, 24, 48, 48});
    EXPECT(!StepSizes(16, 48).vary());
}

TEST_CASE("any ramp: sizes grow, divide, and count every sample once") {
    for (uint64_t draw = 0; draw < 200; ++draw) {
        uint64_t drawn = 0;
        const auto random = [&](int64_t n) { return int64_t(random_bits(draw, ++drawn) % uint64_t(n)); };
        const int64_t unit = 1 + random(5), from = unit * (1 + random(6)), to = from + unit * random(20);
        const int64_t piece = 1 + random(6), length = piece * (1 + random(12)), steps = 1 + random(30);
        const RampedSizes sizes(to, length, {{from, to, steps}, {piece, length, 1 + random(30)}});
        int64_t next = 0, before = 0, before_len = 0;
        for (int64_t step = 1; step <= 40; ++step) {
            DOCTEST_CHECK_MESSAGE(sizes.first_sample(step) == next, draw);
            next += sizes.samples(step);
            EXPECT(sizes.samples(step) % unit == 0);
            EXPECT(sizes.samples(step) >= std::max(before, from));
            EXPECT(length % sizes.seq_len(step) == 0);
            EXPECT(sizes.seq_len(step) % piece == 0);
            EXPECT(sizes.seq_len(step) >= before_len);
            before = sizes.samples(step);
            before_len = sizes.seq_len(step);
        }
        EXPECT(sizes.samples(steps + 1) == to);
    }
}

TEST_CASE("a batch that has changed: every sample once, and at the same sample the learning rate of the first batch") {
    const ChangedSizes sizes({{1, 16}, {11, 8}, {31, 24}}, 32);
    int64_t next = 0;
    for (int64_t step = 1; step <= 60; ++step) {
        EXPECT(sizes.samples(step) == (step <= 10 ? 16 : step <= 30 ? 8 : 24));
        EXPECT(sizes.first_sample(step) == next);
        next += sizes.samples(step);
    }
    TrainOptions whole, changed;
    whole.min_lr = changed.min_lr = 3e-4;
    whole.steps = 80;    // of 16
    changed.steps = 70;  // 10 of 16, 20 of 8 and 40 of 24
    for (const std::string& shape : names_of(lr_shapes()))
        for (const int64_t warmup : {0, 12}) {  // ends at a step of 8
            whole.lr_schedule = changed.lr_schedule = shape;
            whole.warmup_steps = changed.warmup_steps = warmup;
            changed.step_sizes = std::make_shared<ChangedSizes>(sizes);
            const auto lr = [&](int64_t step) { return changed.schedule().at(sizes.position(step)); };
            INFO(shape, ", ", warmup);
            for (int64_t step = 1; step <= 10; ++step) EXPECT(lr(step) == whole.schedule().at(double(step)));
            for (int64_t pair = 1; pair <= 10; ++pair)  // two steps of 8 are one of 16
                EXPECT(lr(10 + 2 * pair) == whole.schedule().at(double(10 + pair)));
            for (int64_t pair = 1; pair <= 20; ++pair)  // two steps of 24 are three of 16
                EXPECT(lr(30 + 2 * pair) == whole.schedule().at(double(20 + 3 * pair)));
        }
    changed.lr_schedule = "linear";  // half a step of 16, of the 68 after the warm-up
    EXPECT(std::abs(changed.schedule().at(sizes.position(15)) / (3e-3 - 2.7e-3 * 0.5 / 68) - 1) <= 1e-14);
    changed.warmup_steps = 20;
    EXPECT(std::abs(changed.schedule().at(sizes.position(15)) / (3e-3 * 12.5 / 20) - 1) <= 1e-14);
}

TEST_CASE("what a ramp may be") {
    EXPECT(ramp_problem("4:16:100").empty());
    EXPECT(parse_ramp("4:16:100").text() == "4:16:100");
    for (const char* bad : {"", "4", "4:16", "4:16:", "4:16:0", "4:16:1:1", "a:16:1", "4:-16:1", "4:16:1.5", "16:4:10",
                            "0:16:4", "4:16:1000001", "4 :16:1", "04:16:1", "4:9999999999:1"})
        DOCTEST_CHECK_MESSAGE(!ramp_problem(bad).empty(), bad);
}

TEST_CASE("a sequence ramp trains on the pieces of the same samples; each piece is a sequence of its own") {
    const Text text;
    TrainOptions o = tiny(text);
    o.micro_batch = 2;
    o.step_sizes = std::make_shared<RampedSizes>(o.global_batch, o.seq_len, Ramps{{}, {4, 16, 2}});
    Session run(o);
    TrainOptions whole = o;
    whole.step_sizes = nullptr;
    Session reference(whole);
    for (int64_t index = 0; index < 4; ++index) {
        const Batch pieces = run.trainer.micro_batch(1, index), samples = reference.trainer.micro_batch(1, index);
        EXPECT(pieces.sequences == 8);
        EXPECT(pieces.seq_len == 4);
        EXPECT(numbers_of(pieces.tokens) == numbers_of(samples.tokens));
        EXPECT(numbers_of(pieces.targets) == numbers_of(samples.targets));
        const std::vector<int32_t> positions = numbers_of(pieces.positions);
        for (size_t i = 0; i < positions.size(); ++i) EXPECT(positions[i] == int32_t(i % 4));
        EXPECT(pieces.loss_scale == samples.loss_scale);
    }
    EXPECT(run.trainer.micro_batch(3, 0).seq_len == 16);
}

TEST_CASE("a batch ramp: fewer micro-batches of the same stream; loss and counts are of the tokens that there are") {
    const Text text;
    TrainOptions o = tiny(text);
    o.micro_batch = 2;
    o.step_sizes = std::make_shared<RampedSizes>(o.global_batch, o.seq_len, Ramps{{4, 8, 2}, {}});
    o.steps = 3;
    Session run(o);
    run.run();
    TrainOptions small = tiny(text);
    small.global_batch = small.micro_batch = 4;  // steps of 4, 4 are what the ramp begins with: 4, 6 -> 4
    small.steps = 2;
    small.lr_schedule = o.lr_schedule = "constant";
    EXPECT(run.trainer.micro_batches(1) == 2);
    EXPECT(run.trainer.micro_batches(2) == 2);
    EXPECT(run.trainer.micro_batches(3) == 4);
    Session first(small);
    first.run();
    for (size_t i = 0; i < 2; ++i)
        EXPECT(std::abs(run.reports[i].loss / first.reports[i].loss - 1) <= (i == 0 ? 1e-6 : 1e-2));
    REQUIRE(run.reports[2].size);
    EXPECT(run.reports[2].size->sequences == 8);
    EXPECT(run.reports[0].size->sequences == 4);
}
