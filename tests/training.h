#pragma once
// A small training run for tests, and what is compared between two of them.
#include <nlohmann/json.hpp>

#include "01_single_gpu/complete/run/outputs.h"
#include "tests/files.h"
#include "tests/support.h"

namespace train70b::test {

// A text file of words in no order, gone at the end of the test.
struct Text {
    Folder folder;
    std::string path = folder / "text.txt";

    Text() {
        const char* words[] = {"the ", "gradient ", "of ", "a ", "loss ", "is ", "summed, ", "once.\n"};
        std::ofstream file(path);
        for (int i = 0; i < 1200; ++i) file << words[random_bits(1, i) % 8];
    }
};

inline TrainOptions tiny(const Text& text) {
    TrainOptions o;
    o.model = {.name = "test", .layers = 2, .hidden = 32, .heads = 4, .kv_heads = 2, .ffn = 48, .vocab = 256};
    o.data = text.path;
    o.seq_len = 16;
    o.global_batch = o.micro_batch = 8;
    o.steps = 4;
    o.warmup_steps = 2;
    o.lr = 1e-2;
    o.min_lr = 1e-3;
    o.init_std = 0.1;  // large enough for attention to matter
    o.device = "cpu";
    return o;
}

// The same with another model, sequence length and batch, and a learning rate that is smaller and constant.
inline TrainOptions of_model(TrainOptions o, const LlamaConfig& model, int64_t seq_len, int64_t global_batch) {
    o.model = model;
    o.model.name = "test";
    o.seq_len = seq_len;
    o.global_batch = o.micro_batch = global_batch;
    o.lr = o.min_lr = 1e-3;
    return o;
}

// Odd sizes; more than 0.2 MiB of gradients, so that buckets of 0.1 MiB are several.
inline TrainOptions odd(const Text& text, int64_t global_batch) {
    TrainOptions o = tiny(text);
    o.model.ffn = 77;
    o.model.hidden = 60;
    o.model.heads = 6;
    o.model.kv_heads = 3;
    o.model.vocab = 131;
    o.seq_len = 13;
    o.global_batch = o.micro_batch = global_batch;
    o.lr = 1e-3;
    o.min_lr = 1e-3;
    return o;
}

// Dataset, model and trainer of one run. While it lives, runs print nothing.
struct Session : RunControl {
    TrainOptions options;
    Dataset data;
    Llama model;
    Trainer trainer;
    RunOutputs outputs;
    std::vector<StepReport> reports;
    std::function<void(const StepReport&)> on_step;  // empty, or called once a report is there
    std::vector<std::string> names;                  // of all parameters of the whole model
    std::vector<std::vector<double>> gradients;      // of each of them, at step 1; on several ranks: on rank 0
    const Quiet quiet;

    // apply: what a chapter does to the model and which roles it takes, before the parameters are allocated
    explicit Session(const TrainOptions& o, const std::function<void(Session&)>& apply = {},
                     const std::optional<Stage>& stage = {})
        : options(o),
          data(o.data, o.model.vocab, o.seq_len, o.val_fraction),
          model(o.model, o.llama(), stage.value_or(full_model(o.model))),
          trainer(o, model, data),
          outputs(trainer, nlohmann::ordered_json::object()) {
        if (apply) apply(*this);
        trainer.controls.push_back(this);
        trainer.allocate();
    }

    void gradients_ready(int64_t step) override {
        if (step > 1) return;
        for (const Param& param : all_params(options.model)) {
            const Tensor full = trainer.full(param, Which::grad);  // empty but on rank 0
            names.push_back(param.name);
            gradients.push_back(full ? values(full) : std::vector<double>());
        }
    }
    void complete(StepReport& report) override {
        reports.push_back(report);
        if (on_step) on_step(report);
    }

    Session& run() {
        trainer.run();
        REQUIRE(int64_t(reports.size()) == options.steps);
        return *this;
    }
    // Loss and gradient norm of every step, one behind another.
    std::vector<double> history() const {
        std::vector<double> list;
        for (const StepReport& report : reports) list.insert(list.end(), {report.loss, report.grad_norm});
        return list;
    }
    std::vector<double> weights() {
        std::vector<double> list;
        for (const Param* param : model.params()) {
            const std::vector<double> part = read(param->data);
            list.insert(list.end(), part.begin(), part.end());
        }
        return list;
    }
};

// Ten thousand times the gradients of one step.
struct SpikeAt : RunControl {
    Trainer& trainer;
    const int64_t at;
    SpikeAt(Trainer& t, int64_t step) : trainer(t), at(step) { trainer.controls.push_back(this); }
    void gradients_ready(int64_t step) override {
        for (Param* param : trainer.model.params())
            for (Tensor& part : trainer.store->gradient_parts(*param))
                if (step == at) scale(part, 1e4);
    }
};

inline std::vector<double> minus(const std::vector<double>& a, const std::vector<double>& b) {
    std::vector<double> difference;
    for (size_t i = 0; i < a.size(); ++i) difference.push_back(a[i] - b[i]);
    return difference;
}

// What N ranks are held to against one: in fp64 every layout, with a bound below which no bug can hide; in fp32 some of
// them, in turn.
struct Parity {
    const char* dtype;
    double bound;
    int64_t each;

    bool skips(int64_t number) const { return number % each != 0; }  // of a list of layouts
};
constexpr Parity kParity[] = {{"fp64", 1e-10, 1}, {"fp32", 5e-6, 4}};

// The farthest that one run is from another, and where.
struct Farthest {
    double value = 0;
    std::string where = "nothing";

    operator double() const { return value; }
    friend std::ostream& operator<<(std::ostream& out, const Farthest& d) {
        return out << d.value << " at " << d.where;
    }
    void add(double deviation, const std::string& of) {  // not a number counts as infinite
        if (deviation <= value) return;
        value = std::isnan(deviation) ? INFINITY : deviation;
        where = of;
    }
};

// The largest relative deviation of a step's loss or gradient norm, and of a parameter's gradient at step 1.
inline Farthest worst_deviation(const Session& a, const Session& b) {
    Farthest worst;
    REQUIRE(a.reports.size() == b.reports.size());
    REQUIRE(a.gradients.size() == b.gradients.size());
    for (size_t i = 0; i < a.reports.size(); ++i) {
        const auto add = [&](double x, double y, const char* what) {
            worst.add(x == y ? 0 : std::abs(x - y) / std::abs(y), fmt::format("step {}, {}", i + 1, what));
        };
        add(a.reports[i].loss, b.reports[i].loss, "loss");
        add(a.reports[i].grad_norm, b.reports[i].grad_norm, "gradient norm");
    }
    for (size_t i = 0; i < a.gradients.size(); ++i)
        worst.add(distance(a.gradients[i], b.gradients[i]), fmt::format("step 1, gradient of {}", a.names[i]));
    return worst;
}

}  // namespace train70b::test
