// Batches: the same samples in every division of the global batch, with and without the reading thread; ignored
// targets; and the thread itself.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "tests/shards.h"
#include "tests/training.h"

using namespace train70b;
using namespace train70b::test;

namespace {

using Ints = std::vector<int32_t>;

Ints ints(const Tensor& x) { return Ints(x.data<int32_t>(), x.data<int32_t>() + x.size()); }

void expect_equal(const Batch& a, const Batch& b) {
    EXPECT(ints(a.tokens) == ints(b.tokens));
    EXPECT(ints(a.targets) == ints(b.targets));
    EXPECT(ints(a.positions) == ints(b.positions));
    EXPECT(a.loss_scale == b.loss_scale);
}

// Three sources: a text, shards with masks, and one that is held out.
struct Sources {
    Folder folder;
    Text text;
    TrainOptions options;

    Sources() {
        std::filesystem::create_directories(folder / "masked");
        write_shard(folder / "masked/a.bin", random_tokens(700, 1), random_mask(700, 2));
        write_shard(folder / "masked/b.bin", random_tokens(900, 3), random_mask(900, 4));
        write_shard(folder / "held.bin", random_tokens(200, 5));
        options = tiny(text);
        options.data = fmt::format("{}:0.4,{}:0.6,{}:0", text.path, folder / "masked", folder / "held.bin");
        options.val_fraction = 0.2;
        options.document_token = 7;
        options.mask_document_ends = true;
    }
    Dataset data() const { return {options.data, options.model.vocab, options.seq_len, options.val_fraction}; }
};

// The mask of tokens that are somewhere in the second source; empty if they are not.
std::vector<uint8_t> mask_of(const Dataset& data, const Ints& tokens) {
    const Source& masked = *data.parts()[1].source;
    const Ints all = masked.read(0, masked.tokens());
    const auto found = std::search(all.begin(), all.end(), tokens.begin(), tokens.end());
    return found == all.end() ? std::vector<uint8_t>() : masked.read_mask(found - all.begin(), int64_t(tokens.size()));
}

}  // namespace

TEST_CASE("the thread: in order, so many ahead, and no more") {
    std::atomic<int64_t> made = 0;
    Prefetch<int64_t> numbers(3, 20, 2, [&](int64_t number) {
        ++made;
        return number * number;
    });
    const auto settle = [&] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
    settle();
    EXPECT(made == 3);  // one to use, two ahead
    EXPECT(numbers.get(3) == 9);
    EXPECT(numbers.get(3) == 9);
    settle();
    EXPECT(made == 3);
    EXPECT(numbers.get(4) == 16);
    settle();
    EXPECT(made == 4);
    EXPECT(numbers.ready() == 3);
    EXPECT(!numbers.has(3));
    EXPECT(numbers.get(15) == 225);  // those between are dropped
    for (int64_t number = 16; number <= 20; ++number) EXPECT(numbers.get(number) == number * number);
    EXPECT(!numbers.has(21));
    EXPECT_CHECK_FAILS(numbers.get(21));
    EXPECT_CHECK_FAILS(numbers.get(3));
    EXPECT(made == 18);
}

TEST_CASE("the thread: an error arrives with the number that it belongs to, and what comes before it is there") {
    Prefetch<int64_t> numbers(1, 10, 2, [&](int64_t number) {
        if (number == 3) throw std::runtime_error("three");
        return number;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT(numbers.get(1) == 1);
    EXPECT(numbers.get(2) == 2);
    for (const int64_t number : {3, 3, 4})
        DOCTEST_CHECK_THROWS_WITH_AS(numbers.get(number), "three", std::runtime_error);
}

TEST_CASE("the thread ends at once, wherever it stands") {
    for (const int taken : {0, 1, 5}) {
        std::atomic<int64_t> made = 0;
        {
            Prefetch<int64_t> numbers(1, 1000000, 2, [&](int64_t number) {
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
                ++made;
                return number;
            });
            for (int i = 1; i <= taken; ++i) EXPECT(numbers.get(i) == i);
            while (taken == 1 && numbers.ready() < 3) std::this_thread::yield();  // then it waits for space
        }
        EXPECT(made <= taken + 3);
    }
}

TEST_CASE("targets: the next token, or -1 where the mask says 0, and behind the end of a document") {
    const Sources sources;
    const Dataset data = sources.data();
    Batches batches(sources.options, data);
    REQUIRE(batches.ignores_targets());
    int64_t masked = 0, ends = 0, left = 0, plain = 0;
    for (int64_t step = 1; step <= 5; ++step) {
        const std::vector<Sample> samples = batches.global_batch(step);
        REQUIRE(samples.size() == 8);
        for (int64_t i = 0; i < 8; ++i) {
            const int64_t index = (step - 1) * 8 + i;
            const Ints tokens = data.sample(sources.options.seed, index).tokens;
            EXPECT(samples[size_t(i)].tokens == tokens);
            const std::vector<uint8_t> mask = mask_of(data, tokens);
            plain += mask.empty();
            for (size_t t = 0; t < 16; ++t) {
                const bool ignored = !mask.empty() && mask[t + 1] == 0, end = tokens[t] == 7;
                EXPECT(samples[size_t(i)].targets[t] == (ignored || end ? -1 : tokens[t + 1]));
                masked += ignored, ends += end, left += !ignored && !end;
            }
        }
    }
    EXPECT(masked > 100);
    EXPECT(ends > 0);
    EXPECT(left > 100);
    EXPECT(plain > 0);
    EXPECT(plain < 40);
}

TEST_CASE("multi-token prediction: the token behind each, and the one behind that as its target, in every division") {
    const Sources sources;
    const Dataset data = sources.data();
    TrainOptions o = sources.options;
    o.model.multi_token = true;
    int64_t ends = 0, aims = 0;
    for (const int64_t parts : {1, 2, 4}) {
        Batches batches(o, data);
        for (int64_t part = 0; part < parts; ++part) {
            batches.of_rank = [=](int64_t length) {  // the later parts first: rows in another order
                const TokenRange range{(parts - 1 - part) * length / parts, length / parts};
                return RankTokens{{range}, {range}};
            };
            batches.begin_step(*one_rank(), *one_rank(), 1);
            const Batch batch = batches.micro_batch(*one_rank(), 1, 0);
            const std::vector<double> next = read(batch.next_tokens), aim = read(batch.next_targets);
            const std::vector<Sample> samples = batches.global_batch(1);
            const int64_t T = 16, count = T / parts, begin = (parts - 1 - part) * count;
            REQUIRE(int64_t(next.size()) == batch.sequences * count);
            for (int64_t i = 0; i < batch.sequences * count; ++i) {
                const size_t t = size_t(begin + i % count);
                const Sample& sample = samples[size_t(i / count)];
                const bool end = sample.tokens[t] == 7;
                EXPECT(next[size_t(i)] == sample.tokens[t + 1]);
                const bool some = t + 1 < size_t(T) && !end;
                EXPECT(aim[size_t(i)] == (some ? sample.targets[t + 1] : -1));
                EXPECT((!some || aim[size_t(i)] < 0 || aim[size_t(i)] == sample.tokens[t + 2]));
                ends += end, aims += aim[size_t(i)] >= 0;
            }
        }
    }
    EXPECT((ends > 0 && aims > 100));
}

TEST_CASE("a batch is a pure function of seed, step, rank and micro-batch: every division has the same samples") {
    const Sources sources;
    const Dataset data = sources.data();
    for (const int64_t step : {1, 2, 1000000}) {
        const std::vector<Sample> samples = Batches(sources.options, data).global_batch(step);
        double targets = 0;
        for (const Sample& sample : samples)
            for (const int32_t target : sample.targets) targets += target >= 0;
        for (const int ranks : {1, 2, 4, 8})
            for (int64_t micro = 1; micro * ranks <= 8; micro *= 2) {
                TrainOptions o = sources.options;
                o.micro_batch = micro;
                std::vector<bool> seen(8);
                double counted = 0;
                for (int rank = 0; rank < ranks; ++rank) {
                    Batches batches(o, data);
                    const Coordinate dp(rank, ranks);
                    counted += batches.begin_step(dp, Group(), step);
                    for (int64_t index = 0; index < batches.count(dp, step); ++index) {
                        const Batch batch = batches.micro_batch(dp, step, index);
                        for (int64_t i = 0; i < micro; ++i) {
                            const size_t at = size_t((index * ranks + rank) * micro + i);
                            const Ints tokens = ints(batch.tokens), expected = ints(batch.targets);
                            for (int64_t t = 0; t < 16; ++t) {
                                EXPECT(tokens[size_t(i * 16 + t)] == samples[at].tokens[size_t(t)]);
                                EXPECT(expected[size_t(i * 16 + t)] == samples[at].targets[size_t(t)]);
                            }
                            seen[at] = true;
                        }
                    }
                }
                EXPECT(counted == targets);
                EXPECT(seen == std::vector<bool>(8, true));
            }
    }
}

TEST_CASE("with the reading thread and without it: the same batches, in a run that begins anywhere") {
    const Sources sources;
    const Dataset data = sources.data();
    TrainOptions o = sources.options;
    o.micro_batch = 2;
    for (const int64_t first : {1, 17}) {
        Batches direct(o, data), ahead(o, data);
        const Coordinate dp(1, 2);
        ahead.start_reading(dp, first, first + 5);
        for (int64_t step = first; step < first + 8; ++step) {  // the last two without the thread
            const double a = direct.begin_step(dp, Group(), step), b = ahead.begin_step(dp, Group(), step);
            EXPECT(a == b);
            for (const int64_t index : {0, 1, 0})
                expect_equal(direct.micro_batch(dp, step, index), ahead.micro_batch(dp, step, index));
        }
        ahead.stop_reading();
        direct.begin_step(dp, Group(), 1), ahead.begin_step(dp, Group(), 1);
        expect_equal(direct.micro_batch(dp, 1, 0), ahead.micro_batch(dp, 1, 0));
    }
}

// Steps of 2, 4, 6 and from then on 8 samples, whose sequences have 4, 8 and from then on 16 tokens.
struct Growing : StepSizes {
    Growing() : StepSizes(8, 16) {}
    int64_t samples(int64_t step) const override { return std::min<int64_t>(2 * step, 8); }
    int64_t seq_len(int64_t step) const override { return step < 3 ? 4 * step : 16; }
    int64_t first_sample(int64_t step) const override { return step < 5 ? step * (step - 1) : 12 + 8 * (step - 4); }
    bool vary() const override { return true; }
};

TEST_CASE("ramps: shorter sequences and smaller batches have the samples' targets, and their own number of them") {
    const Sources sources;
    const Dataset data = sources.data();
    TrainOptions o = sources.options;
    o.micro_batch = 2;
    o.step_sizes = std::make_shared<Growing>();
    Batches batches(o, data);
    const Coordinate dp(0, 1);
    batches.start_reading(dp, 1, 8);
    for (int64_t step = 1; step <= 8; ++step) {
        Ints expected, found;
        for (const Sample& sample : batches.global_batch(step))
            expected.insert(expected.end(), sample.targets.begin(), sample.targets.end());
        const double targets = batches.begin_step(dp, Group(), step);
        EXPECT(targets == double(std::count_if(expected.begin(), expected.end(), [](int t) { return t >= 0; })));
        for (int64_t index = 0; index < batches.count(dp, step); ++index) {
            const Batch batch = batches.micro_batch(dp, step, index);
            EXPECT(batch.seq_len == batches.sizes().seq_len(step));
            EXPECT(batch.loss_scale == 1 / targets);
            const Ints part = ints(batch.targets);
            found.insert(found.end(), part.begin(), part.end());
        }
        EXPECT(found == expected);
    }
    EXPECT(batches.sizes().seq_len(1) == 4);
    EXPECT(batches.sizes().samples(1) == 2);
}

TEST_CASE("a data file that vanishes under a run: the step that needs it says so, not an earlier one") {
    const Folder folder;
    const Text text;
    TrainOptions o = tiny(text);
    o.data = folder / "a.bin";
    write_shard(o.data, random_tokens(1000, 1));
    Session session(o);
    std::filesystem::resize_file(o.data, 1500);
    DOCTEST_CHECK_THROWS_WITH_AS(session.trainer.run(), doctest::Contains("a.bin: has become shorter"),
                                 std::runtime_error);
    Batches batches(o, session.data);
    batches.start_reading(Coordinate(0, 1), 1, 100);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // by now the thread has failed
    DOCTEST_CHECK_THROWS_WITH_AS(batches.micro_batch(Coordinate(0, 1), 1, 0), doctest::Contains("a.bin"),
                                 std::runtime_error);
}

TEST_CASE("a step whose targets are all ignored has no loss and updates nothing; the next one goes on") {
    const Folder folder;
    const Text text;
    TrainOptions o = tiny(text);
    o.data = folder / "a.bin";
    o.seq_len = 16;
    o.weight_decay = 0.1;
    o.val_fraction = 0.5;
    const Ints tokens = random_tokens(400, 1);
    write_shard(o.data, tokens, std::vector<uint8_t>(400, 0));
    Session none(o);
    const std::vector<double> before = none.weights();
    none.run();
    for (const StepReport& report : none.reports) {
        EXPECT(report.loss == 0);
        EXPECT(report.grad_norm == 0);
        EXPECT(report.targets == 0);
    }
    EXPECT(none.weights() == before);
    EXPECT(std::isnan(evaluate(none.trainer)));

    // One target in all: steps without it change nothing, and its loss is that of one token.
    std::vector<uint8_t> mask(400, 0);
    mask[90] = 1;
    write_shard(o.data, tokens, mask);
    o.global_batch = o.micro_batch = 2;
    o.steps = 12;
    Session one(o);
    int64_t empty = 0, full = 0;
    std::vector<double> last = one.weights();
    one.on_step = [&](const StepReport& report) {
        const std::vector<double> now = one.weights();
        REQUIRE(report.targets.has_value());
        EXPECT((now == last) == (*report.targets == 0));
        EXPECT((report.loss > 1) == (*report.targets > 0));
        (*report.targets > 0 ? full : empty) += 1;
        last = now;
    };
    one.run();
    EXPECT(empty > 0);
    EXPECT(full > 0);
}

TEST_CASE("evaluation: every source by itself, over its real targets") {
    const Sources sources;
    Session session(sources.options);
    Trainer& trainer = session.trainer;
    const std::vector<std::optional<double>> losses = evaluate_sources(trainer);
    REQUIRE(losses.size() == 3);
    const Dataset& data = session.data;
    for (size_t part = 0; part < 3; ++part) {
        // The definition: the mean of every target's own loss, one sequence at a time.
        double sum = 0, targets = 0;
        for (int64_t i = 0; i < data.parts()[part].source->validation_samples(); ++i) {
            const Ints tokens = data.validation_sample(part, i).tokens;
            const std::vector<uint8_t> mask = mask_of(data, tokens);
            EXPECT(mask.empty() == (part != 1));
            for (size_t t = 0; t < 16; ++t) {
                if ((!mask.empty() && mask[t + 1] == 0) || tokens[t] == 7) continue;
                Ints only(16, -1), positions(16), starts(16);
                only[t] = tokens[t + 1];
                for (size_t p = 0; p < 16; ++p) {
                    starts[p] = p > 0 && tokens[p - 1] == 7 ? int32_t(p) : p > 0 ? starts[p - 1] : 0;
                    positions[p] = int32_t(p) - starts[p];
                }
                Batch batch{1,
                            16,
                            upload(Ints(tokens.begin(), tokens.end() - 1), {16}, Device::cpu),
                            upload(only, {16}, Device::cpu),
                            upload(positions, {16}, Device::cpu),
                            1.0};
                batch.document_starts = DocumentStarts(starts, Device::cpu);
                sum += values(trainer.loop->forward_only(batch))[0];
                ++targets;
            }
        }
        REQUIRE(losses[part].has_value());
        EXPECT(std::abs(*losses[part] / (sum / targets) - 1) <= 1e-6);
    }
    EXPECT(std::abs(evaluate(trainer) - (0.4 * *losses[0] + 0.6 * *losses[1])) <= 1e-12);
}

TEST_CASE("masks of ones alone: bit for bit the run without masks") {
    const Folder folder;
    const Text text;
    TrainOptions o = tiny(text);
    o.val_fraction = 0.2;
    std::vector<std::vector<double>> histories, weights;
    for (const bool masked : {false, true}) {
        o.data = folder / (masked ? "masked.bin" : "plain.bin");
        write_shard(o.data, random_tokens(1000, 1), std::vector<uint8_t>(masked ? 1000 : 0, 1));
        Session session(o);
        session.run();
        histories.push_back(session.history());
        histories.back().push_back(evaluate(session.trainer));
        weights.push_back(session.weights());
    }
    EXPECT(histories[0] == histories[1]);
    EXPECT(weights[0] == weights[1]);
}
