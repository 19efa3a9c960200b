#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <sstream>

#include "01_single_gpu/core/version.h"
#include "01_single_gpu/run/training_run.h"
#include "08_3d_full/watch/watch.h"
#include "tests/training.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// The text format 0.0.4, as strictly as the textfile collector takes it: HELP and TYPE before the samples of a metric,
// all samples of it together, no sample twice, a line end at the end. Samples by name and labels; problem: the first.
struct ParsedMetrics {
    std::map<std::string, double> samples;
    std::map<std::string, std::string> types;
    std::string problem;

    explicit ParsedMetrics(const std::string& text) {
        const std::regex comment(R"(# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*) (.+))");
        const std::string label = R"([a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*")";
        const std::regex sample("([a-zA-Z_:][a-zA-Z0-9_:]*)(\\{" + label + "(?:," + label + ")*\\})? (\\S+)");
        std::set<std::string> ended;
        std::string current, help;
        std::istringstream lines(text);
        if (!text.ends_with("\n")) problem = "no line end";
        for (std::string line; problem.empty() && std::getline(lines, line);) {
            std::smatch match;
            if (std::regex_match(line, match, comment)) {
                if (match[1] == "HELP") {
                    ended.insert(current);
                    help = match[2];
                    current.clear();
                    if (ended.count(help)) problem = line + ": a metric in two places";
                } else {
                    current = match[2];
                    types[current] = match[3];
                    if (current != help) problem = line + ": TYPE without HELP";
                    if (match[3] != "gauge" && match[3] != "counter") problem = line + ": unknown type";
                    if ((match[3] == "counter") != current.ends_with("_total"))
                        problem = line + ": counters are _total";
                }
            } else if (std::regex_match(line, match, sample)) {
                char* end = nullptr;
                const std::string value = match[3];
                const double number = std::strtod(value.c_str(), &end);
                if (*end != '\0') problem = line + ": not a number";
                if (match[1] != current) problem = line + ": not of the metric " + current;
                if (!samples.emplace(match[1].str() + match[2].str(), number).second) problem = line + ": twice";
            } else {
                problem = line + ": neither comment nor sample";
            }
        }
    }
    double at(const std::string& name) const { return samples.count(name) ? samples.at(name) : NAN; }
};

StepReport report(int64_t step) {
    StepReport r{.step = step, .loss = 2.5, .grad_norm = 0.75, .lr = 1e-3, .tokens_per_s = 1000, .step_s = 0.5};
    r.comm_bytes = {{"dp.all_reduce", 1000}, {"tp.scalar", 8}};
    r.comm_seconds = {{"dp.all_reduce", 0.25}, {"tp.scalar", 0.125}};
    r.memory[int(Memory::params)] = 4096;
    r.straggler = Straggler{.rank = 3, .busy_s = 0.4, .median_busy_s = 0.3, .waited_s = 0.1};
    return r;
}

}  // namespace

TEST_CASE("Prometheus: the parser refuses what the collector refuses") {
    EXPECT(ParsedMetrics("# HELP a x\n# TYPE a gauge\na 1\n").problem.empty());
    EXPECT(ParsedMetrics("# HELP a x\n# TYPE a gauge\na{b=\"c\\\"\\\\\"} +Inf\n").problem.empty());
    for (const char* bad : {"a 1\n", "# HELP a x\n# TYPE a gauge\na 1", "# HELP a x\n# TYPE a gauge\na 1\na 2\n",
                            "# HELP a x\n# TYPE a gauge\na one\n", "# HELP a x\n# TYPE a gauge\na{b=c} 1\n",
                            "# HELP a x\n# TYPE a counter\na 1\n", "# HELP a x\n# TYPE a total\na 1\n",
                            "# HELP a x\n# TYPE a gauge\n# HELP b x\n# TYPE b gauge\nb 1\n# HELP a x\n"})
        DOCTEST_CHECK_MESSAGE(!ParsedMetrics(bad).problem.empty(), bad);
}

TEST_CASE("Prometheus: every metric, valid and with its value") {
    const Folder folder;
    Prometheus prometheus(folder / "a.prom", 0);
    EXPECT(folder.files() == 0);  // until there is something to say
    EXPECT(ParsedMetrics(prometheus.text()).problem == "");
    prometheus.after_step(report(1));
    prometheus.after_step(report(2));
    prometheus.recorded({{"event", "alarm"}, {"kind", "loss_spike"}});
    prometheus.recorded({{"event", "alarm"}, {"kind", "a \"new\"\nkind"}});
    prometheus.recorded({{"event", "replicas_differ"}});
    prometheus.recorded({{"event", "probe"}});
    prometheus.recorded({{"event", "checkpoint"}, {"step", 1}, {"folder", "weights-1"}});
    EXPECT(std::isnan(ParsedMetrics(prometheus.text()).at("train70b_checkpoint_step")));
    prometheus.finish();
    prometheus.recorded({{"event", "checkpoint"}, {"step", 2}, {"folder", "step-2"}});  // the last one comes late
    EXPECT(folder.files() == 1);
    const ParsedMetrics parsed(read_text(folder / "a.prom"));
    EXPECT(parsed.problem == "");
    const std::map<std::string, double> expected = {
        {fmt::format("train70b_build_info{{commit=\"{}\"}}", build_commit()), 1},
        {"train70b_step", 2},
        {"train70b_loss", 2.5},
        {"train70b_grad_norm", 0.75},
        {"train70b_lr", 1e-3},
        {"train70b_tokens_per_second", 1000},
        {"train70b_step_seconds", 0.5},
        {"train70b_comm_bytes_total{operation=\"dp.all_reduce\"}", 2000},
        {"train70b_comm_seconds_total{operation=\"dp.all_reduce\"}", 0.5},
        {"train70b_comm_seconds_total{operation=\"tp.scalar\"}", 0.25},
        {"train70b_memory_bytes{kind=\"params\",rank=\"0\"}", 4096},
        {"train70b_alarms_total{kind=\"loss_spike\"}", 1},
        {"train70b_alarms_total{kind=\"non_finite\"}", 0},
        {"train70b_alarms_total{kind=\"a \\\"new\\\"\\nkind\"}", 1},
        {"train70b_alarms_total{kind=\"replicas_differ\"}", 1},
        {"train70b_straggler_rank", 3},
        {"train70b_straggler_waited_seconds", 0.1},
        {"train70b_checkpoint_step", 2},
        {"train70b_restarts_total", 0}};
    for (const auto& [name, value] : expected) {
        INFO(name);
        EXPECT(parsed.at(name) == doctest::Approx(value));
    }
    EXPECT(parsed.at("train70b_checkpoint_age_seconds") >= 0);
    EXPECT(parsed.types.at("train70b_comm_bytes_total") == "counter");
}

TEST_CASE("Prometheus: a run that goes on counts its restarts; a new one does not") {
    const Folder folder;
    const auto restarts = [&](int64_t first_step) {
        Prometheus prometheus(folder / "a.prom");
        prometheus.after_step(report(first_step));
        prometheus.finish();
        return ParsedMetrics(read_text(folder / "a.prom")).at("train70b_restarts_total");
    };
    EXPECT(restarts(1) == 0);
    EXPECT(restarts(11) == 1);
    EXPECT(restarts(21) == 2);
    EXPECT(restarts(1) == 0);
}

TEST_CASE("Prometheus: at most once in the given time, and at the end") {
    const Folder folder;
    Prometheus prometheus(folder / "a.prom", 3600);
    const auto step = [&] { return ParsedMetrics(read_text(folder / "a.prom")).at("train70b_step"); };
    prometheus.after_step(report(1));
    EXPECT(step() == 1);
    prometheus.after_step(report(2));
    EXPECT(step() == 1);
    prometheus.finish();
    EXPECT(step() == 2);
}

TEST_CASE("Prometheus: a file that cannot be written any more does not end the run") {
    const Folder folder;
    std::filesystem::create_directories(folder.path / "inner");
    Prometheus prometheus(folder / "inner/a.prom", 0);
    prometheus.after_step(report(1));
    std::filesystem::remove_all(folder.path / "inner");
    prometheus.after_step(report(2));
    std::filesystem::create_directories(folder.path / "inner");
    prometheus.after_step(report(3));  // off from the failure on
    EXPECT(!std::filesystem::exists(folder.path / "inner/a.prom"));
    EXPECT_USAGE_ERROR(Prometheus(folder / "nowhere/a.prom"), "--prometheus");
}

TEST_CASE("Prometheus: a run's file, and that of one that ends because it is not finite") {
    const Text text;
    TrainOptions options = tiny(text);
    const WatchOptions watched{.prometheus = text.folder / "a.prom"};
    const Quiet quiet;
    {
        TrainingRun run(options, nlohmann::ordered_json::object());
        Watch watch(watched);
        watch.add_to(run.trainer, run.model, options);
        run.allocate();
        run.trainer.run();
    }
    const ParsedMetrics good(read_text(watched.prometheus));
    EXPECT(good.problem == "");
    EXPECT(good.at("train70b_step") == options.steps);
    EXPECT(good.at("train70b_memory_bytes{kind=\"params\",rank=\"0\"}") > 0);
    options.lr = options.min_lr = 1e30;
    options.warmup_steps = 0;
    options.clip = 0;
    options.steps = 20;
    TrainingRun run(options, nlohmann::ordered_json::object());
    Watch watch(watched);
    watch.add_to(run.trainer, run.model, options);
    run.allocate();
    EXPECT_THROWS_AS(run.trainer.run(), CommonError);
    const ParsedMetrics bad(read_text(watched.prometheus));
    EXPECT(bad.problem == "");
    EXPECT(bad.at("train70b_alarms_total{kind=\"non_finite\"}") == 1);
}
