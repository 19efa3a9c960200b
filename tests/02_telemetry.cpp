// What long runs report about themselves, on several ranks.
#include <chrono>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "01_single_gpu/complete/non_finite.h"
#include "02_data_parallel/complete/data_parallel.h"
#include "02_data_parallel/runtime/comm_roles.h"
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
    struct WithoutPeers : CommRuntime {
        using CommRuntime::CommRuntime;
        bool has_peers() const override { return false; }  // nobody looks for stragglers
    } runtime(world());
    Run run, without;
    without.session->trainer.runtime = &runtime;
    run.session->run();
    without.session->run();
    for (size_t i = 0; i < run.session->reports.size(); ++i) {
        EXPECT_EVERYWHERE(run.session->reports[i].straggler && !without.session->reports[i].straggler);
        EXPECT_EVERYWHERE(run.session->reports[i].comm_bytes == without.session->reports[i].comm_bytes);
    }
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

TEST_CASE("advice fits the cause") {
    const NonFinite first;
    TrainOptions options;
    const auto advises = [&](int64_t step, const std::string& part) {
        INFO(first.advice(step, options));
        EXPECT(first.advice(step, options).find(part) != std::string::npos);
    };
    advises(1, "nothing was trained yet: --lr");
    advises(2, "try a lower --lr");
    options.load_hf = "folder";
    options.init_std = 1e308;  // has no effect
    advises(1, "look at the weights in folder");
    advises(2, "try a lower --lr");
    for (auto& [flag, value] : {std::pair("--weight-decay", &options.weight_decay),
                                {"--z-loss", &options.z_loss},
                                {"--router-scale", &options.model.experts.scale},
                                {"--aux-loss", &options.model.experts.balance.aux_loss}}) {
        const double before = std::exchange(*value, 1e30);
        advises(2, fmt::format("{} 1e+30 is extraordinary", flag));
        *value = before;
    }
    options.eps = 1e-308;
    advises(2, "--eps 1e-308 is extraordinary");
    options = {.init_std = 1e30};
    advises(1, "--init-std 1e+30 is extraordinary");
}

// ---- traces of all ranks ----

TEST_CASE("a trace has every rank, and the ranks' spans of one collective overlap although their clocks differ") {
    const int rank = world().rank(), ranks = world().size();
    const double drift = 0.05 * rank;  // a thousand times that of a bad clock: 50 ms in this run, and more
    set_clock_error(1000.0 * rank - 500, drift);
    std::string path;
    const double begin = now_seconds();
    {
        Run run(1, [&](TrainOptions& options, const Folder& folder) { options.trace = path = folder / "t.json"; });
        run.session->run();
        path = read_text(path);
    }
    const double seconds = now_seconds() - begin;
    set_clock_error(0, 0);
    Failures failures;
    if (rank == 0) {
        const auto trace = nlohmann::json::parse(path);
        struct Calls {
            int count = 0;
            double last_begin = -INFINITY, first_end = INFINITY;
        };
        std::map<std::string, Calls> calls;
        std::map<int, std::string> titles;
        std::map<int, int> phases;
        double earliest = INFINITY, latest = -INFINITY;
        for (const auto& event : trace["traceEvents"]) {
            const int pid = event["pid"];
            if (event["name"] == "process_name") titles[pid] = event["args"]["name"];
            if (event["ph"] != "X") continue;
            const double from = event["ts"].get<double>() / 1e6, to = from + event["dur"].get<double>() / 1e6;
            earliest = std::min(earliest, from);
            latest = std::max(latest, to);
            phases[pid] += event["name"] == "update";
            if (event["name"] != "world.all_reduce" || event["cat"] != "comm") continue;
            failures.expect(event["args"]["group"] == "world", event.dump());
            Calls& call = calls[event["args"]["call"]];
            ++call.count;
            call.last_begin = std::max(call.last_begin, from);
            call.first_end = std::min(call.first_end, to);
        }
        for (int i = 0; i < ranks; ++i) {
            failures.expect(titles[i] == fmt::format("rank {0} (dp {0})", i), fmt::format("title '{}'", titles[i]));
            failures.expect(phases[i] == 4, fmt::format("{} updates of rank {}", phases[i], i));
        }
        failures.expect(calls.size() >= 4, "all-reduces");
        constexpr double kError = 0.005;  // seconds: half a round trip on a loaded machine
        for (const auto& [name, call] : calls) {
            failures.expect(call.count == ranks, fmt::format("{}: {} spans", name, call.count));
            failures.expect(call.last_begin <= call.first_end + kError,
                            fmt::format("{}: begins at {}, after an end at {}", name, call.last_begin, call.first_end));
        }
        failures.expect(latest - earliest <= seconds, fmt::format("{} s in a run of {} s", latest - earliest, seconds));
    }
    EXPECT_NONE(failures);
}

TEST_CASE("events that wait in a file come back in pieces, as they were") {
    EventFile file;
    std::vector<Profile::Event> events;
    for (size_t i = 0; i < 2 * kMostEvents + 1; ++i)
        events.push_back({"dp.send", "comm", 1e9 / 3 + double(i), 1e-9 * double(i), i % 2 ? "dp.send #1, 4 fp32" : ""});
    file.write({events.begin(), events.begin() + 5});
    file.write({events.begin() + 5, events.end()});
    size_t read = 0;
    bool equal = true;
    for (std::vector<Profile::Event> piece = file.read(); !piece.empty(); piece = file.read()) {
        equal = equal && piece.size() <= kMostEvents && read + piece.size() <= events.size();
        for (const Profile::Event& event : piece) {
            const Profile::Event& right = events[read++];
            equal = equal && event.name == right.name && event.category == right.category &&
                    event.begin == right.begin && event.seconds == right.seconds && event.detail == right.detail;
        }
    }
    EXPECT(equal);
    EXPECT(read == events.size());
}

TEST_CASE("the difference of two clocks: linear between the measurements, constant outside") {
    const ClockDifference clock{.begin = 100, .end = 200, .at_begin = 90, .at_end = 91};
    EXPECT(clock.to_rank_0(100) == doctest::Approx(10));
    EXPECT(clock.to_rank_0(150) == doctest::Approx(59.5));
    EXPECT(clock.to_rank_0(200) == doctest::Approx(109));
    EXPECT(clock.to_rank_0(90) == doctest::Approx(0));
    EXPECT(clock.to_rank_0(210) == doctest::Approx(119));
}
