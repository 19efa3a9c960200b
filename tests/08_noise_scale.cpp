// The gradient noise scale: the estimates' expectations where the covariance is known, and its squared norms against
// gradients that are computed apart.
#include "08_3d_full/watch/noise_scale.h"
#include "08_3d_full/watch/ramps.h"
#include "tests/training.h"

using namespace train70b;
using namespace train70b::test;

namespace {

double normal(uint64_t key, uint64_t index) {  // Box and Muller
    const double u = (double(random_bits(key, 2 * index) >> 11) + 1) * 0x1p-53;
    const double v = double(random_bits(key, 2 * index + 1) >> 11) * 0x1p-53;
    return std::sqrt(-2 * std::log(u)) * std::cos(2 * 3.14159265358979323846 * v);
}

struct Mean {
    double sum = 0, squares = 0;
    int64_t count = 0;
    void add(double x) { sum += x, squares += x * x, ++count; }
    double value() const { return sum / double(count); }
    double standard_error() const { return std::sqrt((squares / double(count) - value() * value()) / double(count)); }
};

double norm_squared(const std::vector<double>& x) { return dot(x, x); }

// A run with NoiseScale, which wraps the units before any store does.
struct NoisyRun {
    std::optional<NoiseScale> noise;
    Session session;
    explicit NoisyRun(const TrainOptions& o)
        : session(o, [&](Session& s) {
              noise.emplace(s.trainer);
              s.trainer.controls.push_back(&*noise);
          }) {}
};

}  // namespace

TEST_CASE("estimates of a gradient and a covariance that are known: their means are |G|^2 and tr(Sigma)") {
    const int64_t dimensions = 12, trials = 6000;
    for (const auto& [small, big, ranks] : {std::array<int64_t, 3>{1, 4, 1}, {2, 16, 1}, {2, 16, 4}, {4, 6, 1}}) {
        INFO("batches of " << small << " and " << big << ", small ones averaged over " << ranks << " ranks");
        std::vector<double> gradient, deviation;
        double trace = 0;
        for (int64_t i = 0; i < dimensions; ++i) {
            gradient.push_back(0.3 + 0.1 * double(i % 5));
            deviation.push_back(0.5 + 0.25 * double(i % 3));
            trace += deviation.back() * deviation.back();
        }
        Mean squares, noise;
        NoiseMoments moments;
        for (int64_t trial = 0; trial < trials; ++trial) {
            std::vector<double> total(dimensions, 0.0), part(dimensions, 0.0);
            double small_squares = 0;
            for (int64_t sample = 0; sample < big; ++sample) {
                for (int64_t i = 0; i < dimensions; ++i) {
                    const double g =
                        gradient[i] + deviation[i] * normal(5, uint64_t((trial * 64 + sample) * dimensions + i));
                    total[i] += g / double(big);
                    part[i] += g / double(small);
                }
                // Ranks' first micro-batches lie one after another in the batch.
                if ((sample + 1) % small == 0) {
                    if (sample < small * ranks) small_squares += norm_squared(part) / double(ranks);
                    part.assign(dimensions, 0.0);
                }
            }
            NoiseMoments one;
            one.add(small_squares, norm_squared(total), double(small), double(big));
            squares.add(one.gradient / one.weight);
            noise.add(one.noise / one.weight);
            moments.add(small_squares, norm_squared(total), double(small), double(big));
        }
        const double true_square = norm_squared(gradient);
        for (const auto& [mean, truth] : {std::pair(squares, true_square), {noise, trace}}) {
            EXPECT(std::abs(mean.value() - truth) <= 4 * mean.standard_error());
            EXPECT(mean.standard_error() <= 0.03 * truth);  // so that a wrong factor cannot hide
        }
        // The quotient of the means, not the mean of the quotients.
        EXPECT(std::abs(noise.value() / squares.value() / (trace / true_square) - 1) <= 0.1);
        EXPECT(moments.scale() > 0);
    }
}

TEST_CASE("an average that is not positive gives no noise scale") {
    NoiseMoments moments;
    EXPECT(std::isnan(moments.scale()));
    moments.add(10, 1, 1, 4);  // |G|^2 = (4 - 10) / 3
    EXPECT(moments.gradient < 0);
    EXPECT(std::isnan(moments.scale()));
    NoiseMoments none;
    none.add(1, 1, 1, 4);  // no noise at all
    EXPECT(std::isnan(none.scale()));
    NoiseMoments bad;
    bad.add(NAN, 1, 1, 4);
    EXPECT(std::isnan(bad.scale()));
}

TEST_CASE("small and big gradients of a run are those of the first micro-batch and of the whole batch") {
    const Text text;
    TrainOptions o = tiny(text);
    o.dtype = "fp64";
    o.micro_batch = 2;  // of 8
    for (const char* recompute : {"none", "full"}) {
        o.recompute = recompute;
        o.model.tied = !o.model.tied;
        NoisyRun run(o);
        run.session.run();
        const auto matrices = [](Llama& model) {
            double sum = 0;
            for (const Param* param : model.params())
                if (param->is_matrix() && !(model.config.tied && param == &model.embed_tokens))
                    sum += norm_squared(values(param->grad));
            return sum;
        };
        // Step 1 again, micro-batch by micro-batch.
        Session again(o);
        double small = 0;
        for (int64_t i = 0; i < 4; ++i) {
            Tape tape;
            again.model.forward(tape, again.trainer.micro_batch(1, i));
            tape.backward();
            if (i == 0) small = matrices(again.model) * 16;  // of its own mean: a fourth of the batch
        }
        const double big = matrices(again.model);
        NoiseMoments moments;
        moments.add(small, big, 2, 8);
        const StepReport& first = run.session.reports.front();
        REQUIRE(first.noise_scale);
        INFO("recompute " << recompute << ": noise scale " << *first.noise_scale << " tokens");
        EXPECT(std::abs(*first.noise_scale / (moments.scale() * double(o.seq_len)) - 1) <= 1e-12);
        for (const StepReport& report : run.session.reports) EXPECT(report.noise_scale);
    }
}

TEST_CASE("a step of a ramp is measured with its own batch") {
    const Text text;
    TrainOptions o = tiny(text);
    o.dtype = "fp64";
    o.micro_batch = 2;
    TrainOptions alone = o;
    alone.global_batch = 4;
    alone.steps = 1;
    o.step_sizes = std::make_shared<RampedSizes>(o.global_batch, o.seq_len, Ramps{.batch = {4, 8, 2}});
    NoisyRun ramped(o), first(alone);
    ramped.session.run();
    first.session.run();
    REQUIRE(first.session.reports[0].noise_scale);
    const double found = ramped.session.reports[0].noise_scale.value_or(NAN);
    EXPECT(std::abs(found / *first.session.reports[0].noise_scale - 1) <= 1e-12);
}

TEST_CASE("measuring changes nothing: losses and weights bit for bit; without two batch sizes there is no number") {
    const Text text;
    TrainOptions o = tiny(text);
    for (const int64_t micro_batch : {8, 4}) {
        o.micro_batch = micro_batch;
        Session plain(o);
        plain.run();
        NoisyRun run(o);
        run.session.run();
        EXPECT(run.session.history() == plain.history());
        EXPECT(run.session.weights() == plain.weights());
        for (const StepReport& report : run.session.reports)
            EXPECT(report.noise_scale.has_value() == (micro_batch == 4));
        for (const StepReport& report : plain.reports) EXPECT(!report.noise_scale);
    }
}
