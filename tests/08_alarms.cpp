#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "01_single_gpu/complete/experts/expert_balance.h"
#include "01_single_gpu/complete/run/training_run.h"
#include "08_3d_full/experts/load_alarm.h"
#include "08_3d_full/watch/watch.h"
#include "tests/training.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// The steps, from 1, at which a spike is reported.
std::vector<int> spikes_of(const std::vector<double>& losses, int64_t window = 64, double z = 6) {
    LossSpikes spikes(window, z);
    std::vector<int> steps;
    for (size_t i = 0; i < losses.size(); ++i)
        if (spikes.add(losses[i])) steps.push_back(int(i) + 1);
    return steps;
}

// A run's loss: from 10 to 2, half of it within 20 steps, then slowly; noise of this standard deviation.
std::vector<double> losses(int count, double noise, uint64_t key) {
    std::vector<double> list;
    for (int i = 0; i < count; ++i) {
        double sum = 0;  // of 12 uniform numbers: variance 1
        for (int k = 0; k < 12; ++k) sum += double(random_bits(key, i * 12 + k) >> 11) * 0x1p-53;
        list.push_back(2 + 4 * std::exp(-i / 10.0) + 4 * std::exp(-i / 300.0) + noise * (sum - 6));
    }
    return list;
}

using Steps = std::vector<int>;

}  // namespace

TEST_CASE("loss spikes: none in the fast decrease at the start, nor in noise") {
    for (const double noise : {0.0, 0.01, 0.1})
        for (uint64_t key = 0; key < 20; ++key) {
            INFO("noise " << noise << ", key " << key);
            EXPECT(spikes_of(losses(1000, noise, key)) == Steps{});
        }
    EXPECT(spikes_of(std::vector<double>(200, 2.5)) == Steps{});
}

TEST_CASE("loss spikes: each is found at its first step, also a second one and one while the loss still falls") {
    for (const int step : {30, 100, 500}) {
        std::vector<double> list = losses(1000, 0.05, 7);
        for (int k = 0; k < 5; ++k) list[step - 1 + k] += 3.0 - 0.5 * k;
        list[step + 39] += 2;
        INFO("step " << step);
        EXPECT(spikes_of(list) == Steps{step, step + 40});
    }
}

TEST_CASE("loss spikes: what is reported") {
    LossSpikes spikes(64, 6);
    for (int i = 0; i < 50; ++i) EXPECT(!spikes.add(i % 2 ? 2.1 : 1.9));
    const auto spike = spikes.add(4.0);
    REQUIRE(spike.has_value());
    EXPECT(spike->loss == 4);
    EXPECT(spike->recent == doctest::Approx(2.0));
    EXPECT(spike->z == doctest::Approx(2 * 1.349 / 0.2));  // r is 0.1 or -0.1, in turn
}

TEST_CASE("loss spikes: a new level is one alarm; a window of 0 is off; not a number is one") {
    std::vector<double> level = losses(300, 0.02, 3);
    for (size_t i = 200; i < level.size(); ++i) level[i] += 1;
    EXPECT(spikes_of(level) == Steps{201});
    EXPECT(spikes_of(level, 0) == Steps{});
    level[199] = std::numeric_limits<double>::quiet_NaN();
    EXPECT(spikes_of(level).at(0) == 200);
}

TEST_CASE("a loss spike of a run is a line of its metrics file") {
    const Text text;
    TrainOptions options = tiny(text);
    options.steps = 40;
    options.lr = options.min_lr = 1e-3;
    options.metrics = text.folder / "m.jsonl";
    const Quiet quiet;
    {
        TrainingRun run(options, nlohmann::ordered_json::object());
        const Watch watch({.spike_window = 20}, run.trainer);
        run.allocate();
        struct Damage : RunControl {  // before step 35
            explicit Damage(Llama& model) : model(model) {}
            void complete(StepReport& report) override {
                if (report.step == 34)
                    for (Param* param : model.params())
                        if (param->name == "lm_head.weight") scale(param->data, -20);
            }
            Llama& model;
        } damage(run.model);
        run.trainer.controls.push_back(&damage);
        run.trainer.run();
    }
    std::vector<nlohmann::json> alarms;
    std::istringstream lines(read_text(options.metrics));
    for (std::string line; std::getline(lines, line);)
        if (auto event = nlohmann::json::parse(line); event["event"] == "alarm") alarms.push_back(event);
    REQUIRE(alarms.size() == 1);
    EXPECT(alarms[0]["kind"] == "loss_spike");
    EXPECT(alarms[0]["step"] == 35);
    EXPECT(alarms[0]["z"].get<double>() > 6);
    EXPECT(alarms[0]["loss"].get<double>() > alarms[0]["recent_loss"].get<double>());
}

TEST_CASE("load of experts: one alarm after 20 steps above, another only after a step below; 0 is off") {
    const Text text;
    struct Events : RunControl {
        std::vector<nlohmann::ordered_json> list;
        void recorded(const nlohmann::ordered_json& event) override { list.push_back(event); }
    };
    for (const double most : {3.0, 0.0}) {
        TrainingRun run(tiny(text), nlohmann::ordered_json::object());
        Events events;
        run.trainer.controls.push_back(&events);
        LoadAlarm alarm(run.trainer, most);
        const Quiet quiet;
        for (int step = 1; step <= 100; ++step) {
            StepReport report{.step = step};
            const auto load = std::make_shared<ExpertReport>();
            load->max_over_mean = step == 30 || step == 55 ? 3.0 : 3.5;
            load->dead = 2;
            report.part = load;
            EXPECT(alarm.after_step(report));
        }
        StepReport dense{.step = 101};
        EXPECT(alarm.after_step(dense));
        std::vector<int> steps;
        for (const auto& event : events.list) {
            EXPECT(event["kind"] == "expert_load");
            EXPECT(event["dead"] == 2);
            steps.push_back(event["step"].get<int>());
        }
        EXPECT(steps == (most > 0 ? Steps{20, 50, 75} : Steps{}));
    }
    // The default is below the largest load that there can be, which is N / k.
    const auto usual = [](const ExpertsConfig& experts) {
        LlamaConfig model;
        model.experts = experts;
        return LoadAlarm::threshold(-1, model);
    };
    EXPECT(usual({}) == 0);
    EXPECT(usual({.count = 128, .top_k = 8}) == 3);
    EXPECT(usual({.count = 8, .top_k = 2}) == 3);
    EXPECT(usual({.count = 4, .top_k = 2}) == doctest::Approx(5.0 / 3));
    EXPECT(usual({.count = 2, .top_k = 2}) == 1);
}
