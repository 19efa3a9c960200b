// What long runs report about themselves, on several ranks.
#include <chrono>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "02_data_parallel/data_parallel.h"
#include "02_data_parallel/runtime/measure.h"
#include "tests/parallel.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr double kSleep = 0.3;  // seconds; a step takes a tenth of that or less

// One rank sleeps in each of its steps.
struct SleepyLoop : Accumulate {
    SleepyLoop(Llama& model, int sleeper) : Accumulate(model), sleeps(world().rank() == sleeper) {}
    Tensor forward_backward(const MicroBatches& batches) override {
        if (sleeps) std::this_thread::sleep_for(std::chrono::duration<double>(kSleep));
        return Accumulate::forward_backward(batches);
    }
    const bool sleeps;
};

// Data-parallel training on all ranks, with the chapters' own runtime. Its files are in `text.folder`.
struct Run {
    const Text text;
    CommRuntime runtime{world()};
    std::optional<DataParallel> store;
    std::optional<SleepyLoop> loop;
    std::optional<Session> session;

    explicit Run(int sleeper = -1, const std::function<void(TrainOptions&, const Folder&)>& change = {}) {
        TrainOptions options = tiny(text);
        options.micro_batch = options.global_batch / world().size();
        if (change) change(options, text.folder);
        session.emplace(options, [&](Session& s) {
            store.emplace(s.model, world(), DataParallelOptions{}, AdamW::maker(options.adamw()));
            loop.emplace(s.model, sleeper);
            use_store(s.trainer, *store, world());
            s.trainer.loop = &*loop;
            s.trainer.runtime = &runtime;
        });
    }
    // The lines of the metrics file with this event; none but on rank 0.
    std::vector<nlohmann::json> events(const std::string& name) const {
        std::vector<nlohmann::json> found;
        std::istringstream lines(read_text(session->options.metrics));
        for (std::string line; std::getline(lines, line);)
            if (auto event = nlohmann::json::parse(line); event["event"] == name) found.push_back(event);
        return found;
    }
};
void with_metrics(TrainOptions& options, const Folder& folder) { options.metrics = folder / "m.jsonl"; }

}  // namespace

TEST_CASE("the straggler of a step: the rank that was busy longest") {
    const Straggler s = find_straggler({1.0, 1.0, 1.1, 1.0}, {0.7, 0.6, 0.2, 0.75});
    EXPECT(s.rank == 2);
    EXPECT(s.busy_s == doctest::Approx(0.9));
    EXPECT(s.median_busy_s == doctest::Approx(0.35));  // of 0.25, 0.3, 0.4, 0.9
    EXPECT(s.waited_s == doctest::Approx(0.5));        // 0.7, the median of 0.6, 0.7, 0.75, less its own 0.2
    EXPECT(find_straggler({1, 1}, {0, 0.25}).waited_s == doctest::Approx(0.25));
}

TEST_CASE("a rank that sleeps is every step's straggler, and the others wait for it") {
    const int sleeper = world().size() - 1;
    Run run(sleeper, with_metrics);
    run.session->run();
    Failures failures;
    for (const StepReport& report : run.session->reports) {
        REQUIRE(report.straggler.has_value());
        const Straggler& s = *report.straggler;
        const std::string text = fmt::format("step {}: rank {}, busy {}, median {}, waited {}", report.step, s.rank,
                                             s.busy_s, s.median_busy_s, s.waited_s);
        failures.expect(s.rank == sleeper, text);
        failures.expect(s.busy_s >= kSleep && s.median_busy_s <= s.busy_s - kSleep / 2, text);
        failures.expect(s.waited_s >= kSleep / 2 && s.waited_s <= 2 * kSleep, text);
    }
    if (world().rank() == 0) {
        const auto steps = run.events("step");
        failures.expect(int64_t(steps.size()) == run.session->options.steps, "step events");
        for (const auto& step : steps) failures.expect(step["straggler"]["rank"] == sleeper, step.dump());
    }
    EXPECT_NONE(failures);
}

TEST_CASE("the straggler's numbers are in nobody's bytes") {
    Run run, measured;
    run.session->run();
    const std::vector<MeasuredStep> steps = measure_steps(measured.session->trainer, world(), 2);
    for (size_t i = 0; i < steps.size(); ++i)
        EXPECT_EVERYWHERE(run.session->reports[i].comm_bytes == steps[i].report.comm_bytes);
}

// ---- what is not finite ----

namespace {

// Writes NaN into this parameter's weight or gradient on one rank, at one step, after the gradients were summed.
struct Poison : RunControl {
    Poison(Run& run, int rank, int64_t step, std::string name, Which which)
        : run(run), rank(rank), step(step), name(std::move(name)), which(which) {
        run.session->trainer.controls.push_back(this);
    }
    void gradients_ready(int64_t now) override {
        if (now != step || world().rank() != rank) return;
        for (Param* param : run.session->model.params())
            if (param->name == name) {
                Tensor row = (which == Which::data ? param->data : param->grad).row_slice(0, 1);
                fill(row, NAN);
            }
    }
    Run& run;
    const int rank;
    const int64_t step;
    const std::string name;
    const Which which;
};

// A loss that is not finite on one rank, and with it all of this rank's gradients.
struct NanLoop : Accumulate {
    NanLoop(Llama& model, int rank) : Accumulate(model), bad(world().rank() == rank) {}
    Tensor forward_backward(const MicroBatches& batches) override {
        Tensor loss = Accumulate::forward_backward(batches);
        if (bad) fill(loss, NAN);
        return loss;
    }
    const bool bad;
};

// The error with which a run ends; empty if it does not end with one.
std::string error_of(Run& run) {
    try {
        run.session->trainer.run();
    } catch (const CommonError& error) { return error.what(); }
    return "";
}

}  // namespace

TEST_CASE("a gradient or weight that is not finite: its name and rank, on all ranks, and in the metrics file") {
    const std::string name = "model.layers.1.mlp.up_proj.weight";
    for (const Which which : {Which::grad, Which::data})
        for (const int rank : {0, 2}) {
            Run run(-1, with_metrics);
            const Poison poison(run, rank, 3, name, which);
            // A weight is not seen in the norm of the gradients but in the next step's loss, which makes all
            // gradients, on all ranks, not a number.
            const int64_t step = which == Which::grad ? 3 : 4;
            const std::string ranks = which == Which::grad ? "1 of 4 ranks has" : "4 of 4 ranks have";
            const std::string what = which == Which::grad ? name + " (its gradient)" : name, error = error_of(run);
            INFO(error);
            EXPECT_EVERYWHERE(error.starts_with(fmt::format("step {}: loss ", step)));
            EXPECT_EVERYWHERE(error.find(fmt::format("parameter: {} on rank {} ({} one)", what, rank, ranks)) !=
                              std::string::npos);
            EXPECT_EVERYWHERE(int64_t(run.session->reports.size()) == step - 1);
            Failures failures;
            if (world().rank() == 0) {
                const auto alarms = run.events("alarm");
                failures.expect(alarms.size() == 1, "one alarm");
                failures.expect(run.events("step").size() == size_t(step - 1), "the steps before it");
                if (alarms.size() == 1) {
                    const nlohmann::json& alarm = alarms[0];
                    failures.expect(alarm["kind"] == "non_finite" && alarm["step"] == step, alarm.dump());
                    failures.expect(alarm["parameter"] == name && alarm["rank"] == rank, alarm.dump());
                    failures.expect(alarm["of"] == (which == Which::grad ? "gradient" : "weight"), alarm.dump());
                    failures.expect(alarm["grad_norm"].is_null(), alarm.dump());
                }
            }
            EXPECT_NONE(failures);
        }
}

TEST_CASE("a loss that is not finite on one rank") {
    Run run(-1, with_metrics);
    NanLoop loop(run.session->model, 1);
    run.session->trainer.loop = &loop;
    const std::string error = error_of(run);
    INFO(error);
    EXPECT_EVERYWHERE(error.starts_with("step 1: loss nan, gradient norm "));
    EXPECT_EVERYWHERE(error.find("parameter: none on rank 1 (0 of 4 ranks have one)") !=
                      std::string::npos);  // the gradients are what they should be
    // With gradients that are not finite on two ranks, the cause is the one whose own loss is not.
    Run both(-1, with_metrics);
    NanLoop bad(both.session->model, 3);
    both.session->trainer.loop = &bad;
    const Poison first(both, 0, 1, "model.norm.weight", Which::grad), second(both, 3, 1, "lm_head.weight", Which::grad);
    const std::string text = error_of(both);
    INFO(text);
    EXPECT_EVERYWHERE(text.find("lm_head.weight (its gradient) on rank 3 (2 of 4 ranks have one)") != text.npos);
}
