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
    EXPECT(s.median_busy_s == doctest::Approx(0.4));  // of 0.25, 0.3, 0.4, 0.9
    EXPECT(s.waited_s == doctest::Approx(0.5));       // 0.7, the median of 0.6, 0.7, 0.75, less its own 0.2
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
    EXPECT_EVERYWHERE(!steps[0].report.straggler);
}
