// Grades the lab vocabulary-loss.
#include "04_tensor_parallel/complete/vocabulary.h"
#include "tests/labs.h"
#include "tests/ranks.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr int64_t kRows = 24, kVocab = 64;
constexpr double kScale = 0.125;

// With ignored rows, every fifth.
int32_t target(int64_t row, int64_t vocab, bool ignored = true) {
    return ignored && row % 5 == 2 ? kIgnored : int32_t(random_bits(3, uint64_t(row)) % uint64_t(vocab));
}

struct Case {
    std::vector<double> logits;  // (R, V)
    int64_t vocab = kVocab;
    bool ignored = true;
    LossOptions options = {};

    Batch batch() const {
        std::vector<int32_t> ids;
        for (int64_t i = 0; i < kRows; ++i) ids.push_back(target(i, vocab, ignored));
        return {.targets = upload(ids, {kRows}, Device::cpu), .loss_scale = kScale};
    }
};

int64_t part_size(int64_t vocab) { return (vocab + world().size() - 1) / world().size(); }

// This rank's columns of (R, V); padding is 0.
std::vector<double> own_columns(const std::vector<double>& whole, int64_t vocab) {
    const int64_t each = part_size(vocab), first = each * world().rank();
    std::vector<double> part;
    for (int64_t row = 0; row < kRows; ++row)
        for (int64_t v = first; v < first + each; ++v) part.push_back(v < vocab ? whole[size_t(row * vocab + v)] : 0);
    return part;
}

struct Result {
    std::vector<double> loss, gradient;
};
Result whole(const Case& c) {
    Tape tape;
    const Var x{.data = tensor(c.logits, {kRows, c.vocab})};
    const Var loss = next_token_loss(tape, x, c.batch(), c.options);
    const std::vector<double> numbers = values(loss.data);
    tape.backward();
    return {numbers, own_columns(values(*x.grad), c.vocab)};
}
Var part_of(const Case& c) { return {.data = tensor(own_columns(c.logits, c.vocab), {kRows, part_size(c.vocab)})}; }
Var parallel_loss(Tape& tape, const Var& x, const Case& c) {
    return vocabulary_parallel_loss(tape, x, c.batch(), world(), part_size(c.vocab) * world().rank(), c.vocab,
                                    c.options);
}
Result parallel(const Case& c) {
    Tape tape;
    const Var x = part_of(c);
    const Var loss = parallel_loss(tape, x, c);
    REQUIRE(loss.data);
    const std::vector<double> numbers = values(loss.data);
    tape.backward();
    return {numbers, *x.grad ? values(*x.grad) : std::vector<double>(size_t(x.data.size()))};
}

std::vector<double> some_logits(int64_t vocab) {
    std::vector<double> x = randoms(kRows * vocab, 4);
    for (double& each : x) each *= 3;
    return x;
}
// The same, but 0 at the target and at its place among every rank's columns: target logits, right or wrong, are 0.
std::vector<double> without_target_logits() {
    std::vector<double> x = some_logits(kVocab);
    for (int64_t row = 0; row < kRows; ++row)
        for (int64_t v = 0; v < kVocab; ++v)
            if (v % part_size(kVocab) == target(row, kVocab, false) % part_size(kVocab))
                x[size_t(row * kVocab + v)] = 0;
    return x;
}

bool near(double a, double b) { return std::abs(a - b) <= 1e-5 * std::abs(b); }

double all_norm(const std::vector<double>& x) { return std::sqrt(world().sum(dot(x, x))); }

CommStats::Entry sent(const std::function<void()>& body) {
    world().take_stats();
    body();
    CommStats::Entry all;
    for (const auto& [name, entry] : world().take_stats().operations)
        all.calls += entry.calls, all.bytes += entry.bytes;
    return all;
}

}  // namespace

TEST_CASE("lab: the loss") {
    const Case zero{.logits = without_target_logits(), .ignored = false},
        any{.logits = some_logits(kVocab), .ignored = false};
    const double lse = parallel(zero).loss[0], loss = parallel(any).loss[0];
    const double most = world().max(loss), least = -world().max(-loss);
    figure("loss where all target logits are 0", lse, whole(zero).loss[0], "", "log sum e^x", "", 1e-5);
    figure("loss", most, whole(any).loss[0], "", "log sum e^x - x_target",
           near(lse, whole(zero).loss[0]) ? "The target's logit is wrong: one rank has it, the others add 0. Which "
                                            "columns are yours says first_vocab."
                                          : "",
           1e-5);
    figure("ranks' losses differ by", most - least, 0.0, "", "0");
}

TEST_CASE("lab: large logits, each rank's of another size") {
    for (const double level : {-100.0, 100.0}) {
        Case c{.logits = without_target_logits(), .ignored = false};
        for (int64_t row = 0; row < kRows; ++row)
            for (int64_t v = 0; v < kVocab; ++v)
                if (double& logit = c.logits[size_t(row * kVocab + v)]; logit != 0)
                    logit += level * double(1 + v / part_size(kVocab));
        figure(fmt::format("loss, logits around {:.0f} times (rank + 1)", level), parallel(c).loss[0], whole(c).loss[0],
               "", "as on one rank",
               "Sums of exponentials may be added only under a common maximum, that of the whole row: the maximum is "
               "reduced first, and each rank's sum is rescaled to it.",
               1e-5);
    }
}

TEST_CASE("lab: the gradient of the logits") {
    const Case c{.logits = some_logits(kVocab), .ignored = false};
    const std::vector<double> expected = whole(c).gradient, got = parallel(c).gradient;
    // What wrong one-hots give: none at all, or at column `target` of every rank that has so many columns.
    std::vector<double> none = expected, everywhere_ = expected;
    const int64_t each = part_size(kVocab), first = each * world().rank();
    for (int64_t row = 0; row < kRows; ++row) {
        const int32_t t = target(row, kVocab, false);
        if (t >= first && t < first + each) {
            none[size_t(row * each + t - first)] += kScale;
            everywhere_[size_t(row * each + t - first)] += kScale;
        }
        if (t < each) everywhere_[size_t(row * each + t)] -= kScale;
    }
    const double n = all_norm(got);
    figure("gradient of all logits, its norm", n, all_norm(expected), "", "as on one rank",
           n == 0                    ? "There is none: record a step that sets *logits.grad."
           : near(n, all_norm(none)) ? "Nothing is subtracted at the target."
           : near(n, all_norm(everywhere_))
               ? "The one-hot is subtracted at column `target` of every rank: only its owner "
                 "subtracts it, at target - first_vocab."
               : "",
           1e-5);
    Failures failures;
    failures.expect(distance(got, expected) <= 1e-5, "the gradients are wrong, or in wrong places");
    EXPECT_NONE(failures);
}

TEST_CASE("lab: the bytes of a loss") {
    const int64_t N = world().size(), bytes = sent([] { parallel({.logits = some_logits(kVocab)}); }).bytes;
    figure("bytes that a rank sends", bytes, 2 * 3 * 4 * kRows * (N - 1) / N, "B",
           "2 (N-1)/N of 3 numbers of 4 B per row",
           bytes >= 4 * kRows * kVocab * (N - 1) / N
               ? "These are the logits themselves: only three numbers per row are needed."
           : bytes < 2 * 3 * 4 * kRows * (N - 1) / N ? "One of the three is not reduced: maximum, sum, target's logit."
                                                     : "");
}

TEST_CASE("lab: the messages of a loss") {
    const int64_t calls = sent([] { parallel({.logits = some_logits(kVocab)}); }).calls;
    figure("collectives", calls, int64_t(2), "", "the maximum; then sum and target's logit",
           calls == 3
               ? "The sum and the target's logit can travel together: one tensor (2, R), of which both are views."
               : "");
}

TEST_CASE("lab: no second tensor of the logits' size") {
    Tape tape;
    const Case c{.logits = some_logits(kVocab)};
    const Var x = part_of(c);
    ledger().reset_peak();
    const int64_t before = ledger().total();
    const Var loss = parallel_loss(tape, x, c);
    tape.backward();
    const int64_t peak = int64_t(world().max(double(ledger().peak().total - before)));
    figure("tensors of the logits' size, besides them", peak / x.data.bytes(), int64_t(0), "", "none",
           peak >= x.data.bytes() * world().size() ? "All ranks' logits are gathered."
                                                   : "The gradient overwrites the logits.");
    Failures failures;
    failures.expect(*x.grad && x.grad->same_memory(x.data), "*logits.grad is another tensor than the logits");
    EXPECT_NONE(failures);
}

TEST_CASE("lab: ignored rows, padding, z-loss, scaled logits, evaluation") {
    Failures failures;
    for (const LossOptions& options : {LossOptions{}, LossOptions{.z_loss = 0.1}, LossOptions{.logit_scale = 0.5}})
        for (const int64_t vocab : {kVocab, kVocab - 3}) {
            const Case c{.logits = some_logits(vocab), .vocab = vocab, .options = options};
            const Result expected = whole(c), got = parallel(c);
            const std::string what =
                fmt::format("vocabulary {}, z-loss {}, logit scale {}: ", vocab, options.z_loss, options.logit_scale);
            failures.expect(got.loss.size() == expected.loss.size(), what + "numbers of the loss");
            for (size_t i = 0; i < std::min(got.loss.size(), expected.loss.size()); ++i)
                failures.expect(near(got.loss[i], expected.loss[i]),
                                what + (i == 0 ? "the loss" : "what the z-loss adds"));
            for (size_t i = 0; i < got.gradient.size(); ++i)
                failures.expect(std::abs(got.gradient[i] - expected.gradient[i]) <= 1e-6, what + "the gradient");
        }
    Tape silent{.recording = false};
    const Case c{.logits = some_logits(kVocab)};
    const Var x = part_of(c);
    const std::vector<double> before = values(x.data);
    const Var loss = parallel_loss(silent, x, c);
    failures.expect(values(x.data) == before, "evaluation (a tape that does not record) overwrites the logits");
    EXPECT_NONE(failures);
}
