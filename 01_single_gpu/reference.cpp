#include "01_single_gpu/reference.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

namespace train70b {

using nlohmann::json;
using nlohmann::ordered_json;

// ---- writing -------------------------------------------------------------------------------------------------------

namespace {
constexpr const char* kFlag = "--save-reference";
constexpr const char* kFormat = "train70b reference run";

std::vector<StoredTensor> entries(const std::vector<Param>& params, DType dtype) {
    std::vector<StoredTensor> list;
    for (const Param& param : params) list.push_back({param.name, dtype, param.global_shape});
    return list;
}
}  // namespace

ReferenceWriter::ReferenceWriter(const TrainOptions& o, const LlamaConfig& config, const ordered_json& flags)
    : params_(all_params(config)) {
    if (o.steps < 1)
        usage_error("{} {}: holds the gradients of step 1; --steps 1 or more would do", kFlag, o.save_reference);
    if (this_rank != 0) return;
    const DType dtype = o.llama().dtype;
    folder_.emplace(kFlag, o.save_reference);
    config_file_.emplace(kFlag, folder_->file("config.json"));
    initial_.emplace(kFlag, folder_->file("initial.safetensors"), entries(params_, dtype));
    gradients_.emplace(kFlag, folder_->file("gradients.safetensors"), entries(params_, DType::f32));
    json_file_.emplace(kFlag, folder_->file("reference.json"));

    const ordered_json model = hf_config(config, dtype);
    config_file_->write(model.dump(2) + "\n");
    const ordered_json head = {
        {"format", kFormat}, {"version", 1},   {"flags", flags},       {"model", model},
        {"dtype", o.dtype},  {"seed", o.seed}, {"seq_len", o.seq_len}, {"global_batch", o.global_batch}};
    json_file_->write("{\n");
    for (const auto& [key, value] : head.items()) json_file_->write(fmt::format("  \"{}\": {},\n", key, value.dump()));
    json_file_->write("  \"steps\": [");
}

void ReferenceWriter::initial_weights(const Whole& whole) {
    write_whole(initial_ ? &*initial_ : nullptr, params_, whole, Which::data);
}

void ReferenceWriter::gradients(const Whole& whole) {
    write_whole(gradients_ ? &*gradients_ : nullptr, params_, whole, Which::grad);
}

void ReferenceWriter::step(const StepReport& report, const std::vector<std::vector<int32_t>>& samples) {
    if (!json_file_) return;
    const ordered_json line = {{"step", report.step},
                               {"loss", nine_digits(report.loss)},
                               {"grad_norm", nine_digits(report.grad_norm)},
                               {"lr", report.lr},
                               {"tokens", samples}};
    json_file_->write((steps_++ ? ",\n    " : "\n    ") + line.dump());
}

void ReferenceWriter::finish() {
    if (!json_file_) return;
    json_file_->write("\n  ]\n}\n");
    initial_->commit();
    gradients_->commit();
    config_file_->commit();
    json_file_->commit();
}

// ---- comparing -----------------------------------------------------------------------------------------------------

namespace {

// ||a - b|| / ||b||: 0 where both are zero, infinite where only b is.
double relative(double difference, double size) { return difference == 0 ? 0 : difference / size; }

// Farthest first, and a NaN is farther than all: it stands at the top, not where a comparison happens to leave it.
void sort_worst_first(std::vector<Deviation>& list) {
    const auto rank = [](const Deviation& d) { return std::isnan(d.relative) ? HUGE_VAL : d.relative; };
    std::stable_sort(list.begin(), list.end(),
                     [&](const Deviation& a, const Deviation& b) { return rank(a) > rank(b); });
}

std::vector<Deviation> compare_files(const std::string& a_path, const std::string& b_path,
                                     std::vector<std::string>& problems) {
    const SafetensorsFile a(a_path), b(b_path);
    for (const SafetensorsFile* file : {&a, &b})
        if (file->tensors().empty()) usage_error("{}: holds no tensors", file->path());
    std::vector<Deviation> list;
    for (const auto& [name, of_a] : a.tensors()) {
        const auto at = b.tensors().find(name);
        if (at == b.tensors().end()) {
            problems.push_back(fmt::format("{} is in {} only", quoted(name), a_path));
            continue;
        }
        const StoredTensor& of_b = at->second;
        if (of_a.shape != of_b.shape) {
            problems.push_back(fmt::format("{} is {} in {} and {} in {}", quoted(name), to_string(of_a.shape), a_path,
                                           to_string(of_b.shape), b_path));
            continue;
        }
        Tensor x({of_a.size()}, DType::f32, Device::cpu, Memory::workspace), y = Tensor::like(x, Memory::workspace);
        a.read(of_a, x);
        b.read(of_b, y);
        double difference = 0, size = 0;
        for (int64_t i = 0; i < x.size(); ++i) {
            const double xi = x.data<float>()[i], yi = y.data<float>()[i];
            difference += (xi - yi) * (xi - yi);
            size += yi * yi;
        }
        list.push_back({name, relative(std::sqrt(difference), std::sqrt(size)), std::sqrt(size)});
    }
    for (const auto& entry : b.tensors())
        if (!a.tensors().contains(entry.first))
            problems.push_back(fmt::format("{} is in {} only", quoted(entry.first), b_path));
    sort_worst_first(list);
    return list;
}

struct Step {
    double loss, grad_norm;
    std::vector<std::vector<int64_t>> tokens;
};

std::vector<Step> read_steps(const std::string& dir) {
    const std::string path = dir + "/reference.json";
    std::ifstream stream(path);
    if (!stream) usage_error("{}: cannot be read; name a folder that --save-reference wrote", path);
    const json file = json::parse(stream, nullptr, /*allow_exceptions=*/false);
    if (!file.is_object() || file.value("format", json()) != kFormat || file.value("version", json()) != 1)
        usage_error("{}: is no \"{}\" of version 1", path, kFormat);
    const auto number = [](const json& value) { return value.is_null() ? NAN : value.get<double>(); };
    std::vector<Step> steps;
    try {
        for (const json& step : file.at("steps"))
            steps.push_back({number(step.at("loss")), number(step.at("grad_norm")), step.at("tokens")});
    } catch (const json::exception&) {
        usage_error("{}: steps[{}] lacks a loss, a grad_norm or tokens", path, steps.size());
    }
    if (steps.empty()) usage_error("{}: holds no steps", path);
    return steps;
}

}  // namespace

Comparison compare_references(const std::string& a, const std::string& b) {
    const std::vector<Step> of_a = read_steps(a), of_b = read_steps(b);
    Comparison c;
    c.weights = compare_files(a + "/initial.safetensors", b + "/initial.safetensors", c.problems);
    c.gradients = compare_files(a + "/gradients.safetensors", b + "/gradients.safetensors", c.problems);
    if (of_a.size() != of_b.size())
        c.problems.push_back(fmt::format("{} steps in {}, {} in {}", of_a.size(), a, of_b.size(), b));
    for (size_t i = 0; i < std::min(of_a.size(), of_b.size()); ++i) {
        const Step &x = of_a[i], &y = of_b[i];
        const std::string name = fmt::format("step {}", i + 1);
        c.same_tokens = c.same_tokens && x.tokens == y.tokens;
        c.samples += int64_t(x.tokens.size());
        c.losses.push_back({name, relative(std::abs(x.loss - y.loss), std::abs(y.loss)), y.loss});
        c.norms.push_back({name, relative(std::abs(x.grad_norm - y.grad_norm), y.grad_norm), y.grad_norm});
    }
    for (std::vector<Deviation>* list : {&c.losses, &c.norms}) sort_worst_first(*list);
    return c;
}

bool Comparison::within(double tolerance) const {
    if (!problems.empty() || !same_tokens) return false;
    for (const std::vector<Deviation>* list : {&weights, &gradients, &losses, &norms})
        for (const Deviation& d : *list)
            if (!(d.relative <= tolerance)) return false;
    return true;
}

std::string comparison_table(const Comparison& c, double tolerance) {
    std::string text;
    for (const std::string& problem : c.problems) text += problem + "\n";
    text += fmt::format("{:<18}{} ({} samples in {} steps)\n", "tokens", c.same_tokens ? "equal" : "differ", c.samples,
                        c.losses.size());
    const auto line = [&](const char* what, const std::vector<Deviation>& list) {
        if (list.empty()) return;
        const Deviation& worst = list[0];
        text +=
            fmt::format("{:<18}{}\n", what,
                        worst.relative == 0 ? "equal" : fmt::format("worst {:.3g}, {}", worst.relative, worst.name));
    };
    line("initial weights", c.weights);
    line("losses", c.losses);
    line("gradient norms", c.norms);
    constexpr size_t kShown = 5;
    const size_t shown = std::min(kShown, c.gradients.size());
    text += fmt::format("\ngradients at step 1, the worst {} of {} parameters\n{:>14}{:>14}   parameter\n", shown,
                        c.gradients.size(), "|a-b| / |b|", "|b|");
    for (size_t i = 0; i < shown; ++i) {
        const Deviation& d = c.gradients[i];
        text += fmt::format("{:>14.3g}{:>14.6g}   {}\n", d.relative, d.size, d.name);
    }
    const std::string worst = c.gradients.empty() ? ""
                                                  : fmt::format("; worst gradient: {} by {:.3g}", c.gradients[0].name,
                                                                c.gradients[0].relative);
    return text + fmt::format("\n{} {:g}{}\n", c.within(tolerance) ? "the runs agree within" : "the runs DIFFER beyond",
                              tolerance, worst);
}

}  // namespace train70b
