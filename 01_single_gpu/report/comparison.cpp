#include "01_single_gpu/report/comparison.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "01_single_gpu/core/json.h"
#include "01_single_gpu/report/facts.h"
#include "01_single_gpu/report/reference.h"

namespace train70b {

using nlohmann::json;

namespace {

// The tolerance of ||a - b|| / ||b|| for a correct implementation with the same dtype.
constexpr double kFp64Tolerance = 1e-10, kFp32Tolerance = 5e-6;
constexpr double kBf16Tolerance = 2e-2;  // twice the largest deviation of the 36 layouts of tests/08_grid.cpp, 1.1e-2
// The update of step 1 divides gradients by their magnitude: in fp32, (1 - beta2) / (1 - beta2^1) alone is off by up to
// 1.3e-5 for beta2 = 0.999. Its bound is this many tolerances; a wrong weight decay of 0.1 deviates by 0.1 x std.
constexpr double kUpdateTolerances = 20;
// Steps whose losses and norms are checked. After them, AdamW amplifies rounding errors of the first steps.
constexpr int64_t kCheckedSteps = 4, kCheckedStepsFp64 = 2, kCheckedStepsFp64Gentle = 20;

double tolerance_of(DType dtype) {
    return dtype == DType::f64 ? kFp64Tolerance : dtype == DType::bf16 ? kBf16Tolerance : kFp32Tolerance;
}

// ||a - b|| / ||b||: 0 if both are equal, infinite if only b is 0.
double relative(double difference, double size) { return difference == 0 ? 0 : difference / std::abs(size); }

// Sorts by decreasing deviation, NaN first.
void sort_worst_first(std::vector<Deviation>& list) {
    const auto rank = [](const Deviation& d) { return std::isnan(d.relative) ? HUGE_VAL : d.relative; };
    std::stable_sort(list.begin(), list.end(),
                     [&](const Deviation& a, const Deviation& b) { return rank(a) > rank(b); });
}

struct Step {
    double loss, grad_norm, lr;
    std::vector<std::vector<int64_t>> tokens, targets;
};

struct Run {
    std::string dir;
    DType dtype = DType::f32;
    int64_t version = 2;
    json flags, model;
    double hidden = NAN;  // of the model
    std::vector<Step> steps;

    // The value of a flag, stored as text or as a number; NaN if there is none.
    double flag(const char* name) const {
        const json value = flags.value(name, json());
        if (value.is_number()) return value.get<double>();
        if (!value.is_string()) return NAN;
        char* end = nullptr;
        const std::string text = value.get<std::string>();
        const double number = std::strtod(text.c_str(), &end);
        return text.empty() || *end != '\0' ? NAN : number;
    }
    // Whether AdamW amplifies rounding errors so little that fp64 runs can be checked for more steps.
    bool gentle() const {
        return flag("lr") <= 3e-3 && flag("warmup-steps") >= 20 && flag("init-std") <= 0.1 && flag("eps") >= 1e-8;
    }
};

Run read_run(const std::string& dir) {
    const std::string path = dir + "/reference.json";
    const json file = read_json(path, path, "must be a folder that --save-reference wrote");
    const json version = file.is_object() ? file.value("version", json()) : json();
    if (!file.is_object() || file.value("format", json()) != kReferenceFormat || (version != 1 && version != 2))
        usage_error("{}: is not a \"{}\" of version 1 or 2", path, kReferenceFormat);
    Run run{.dir = dir,
            .version = version,
            .flags = file.value("flags", json::object()),
            .model = file.value("model", json())};
    if (!run.flags.is_object()) usage_error("{}: \"flags\" is not an object", path);
    const json hidden = run.model.is_object() ? run.model.value("hidden_size", json()) : json();
    if (hidden.is_number()) run.hidden = hidden.get<double>();
    const json dtype = file.value("dtype", json("fp32"));
    if (dtype == "bf16")
        run.dtype = DType::bf16;
    else if (dtype == "fp64")
        run.dtype = DType::f64;
    else if (dtype != "fp32")
        usage_error("{}: \"dtype\" must be fp32, bf16 or fp64", path);

    const json steps = file.value("steps", json());
    if (!steps.is_array() || steps.empty()) usage_error("{}: \"steps\" must be a list with at least one step", path);
    const auto refuse = [&](const std::string& why) { usage_error("{}: steps[{}] {}", path, run.steps.size(), why); };
    for (const json& step : steps) {
        // null means NaN, which differs from everything.
        const auto number = [&](const char* key) {
            const json value = step.is_object() ? step.value(key, json("none")) : json("none");
            if (!value.is_null() && !value.is_number()) refuse(fmt::format("\"{}\" must be a number", key));
            return value.is_null() ? NAN : value.get<double>();
        };
        Step read{number("loss"), number("grad_norm"), NAN, {}, {}};
        if (read.grad_norm < 0) refuse(fmt::format("\"grad_norm\" is {} (must not be negative)", read.grad_norm));
        if (step.contains("lr")) read.lr = number("lr");
        const auto samples = [&](const char* key) {
            std::vector<std::vector<int64_t>> list;
            const json value = step.value(key, json());
            if (!value.is_array()) refuse(fmt::format("\"{}\" must be a list of samples", key));
            for (const json& sample : value) {
                if (!sample.is_array()) refuse(fmt::format("\"{}\" must be a list of samples", key));
                std::vector<int64_t>& ids = list.emplace_back();
                for (const json& id : sample) {
                    if (!id.is_number_integer()) refuse(fmt::format("has token {} (must be an integer)", id.dump()));
                    ids.push_back(id.get<int64_t>());
                }
            }
            return list;
        };
        read.tokens = samples("tokens");
        if (step.contains("targets")) {
            read.targets = samples("targets");
        } else {  // each token's is the next one
            read.targets = read.tokens;
            for (std::vector<int64_t>& sample : read.targets)
                if (!sample.empty()) sample.erase(sample.begin());
        }
        run.steps.push_back(std::move(read));
    }
    return run;
}

// The matching tensors of one file of both runs; reports mismatches as problems.
struct FilePair {
    SafetensorsFile a, b;
    std::vector<std::string> names;  // of the tensors that both files have, with equal shapes

    FilePair(const std::string& a_path, const std::string& b_path, std::vector<std::string>& problems)
        : a(a_path), b(b_path) {
        for (const SafetensorsFile* file : {&a, &b})
            if (file->tensors().empty()) usage_error("{}: has no tensors", file->path());
        for (const auto& [name, of_a] : a.tensors()) {
            const auto at = b.tensors().find(name);
            if (at == b.tensors().end())
                problems.push_back(fmt::format("{} is in {} only", quoted(name), a_path));
            else if (of_a.shape != at->second.shape)
                problems.push_back(fmt::format("{} is {} in {} and {} in {}", quoted(name), to_string(of_a.shape),
                                               a_path, to_string(at->second.shape), b_path));
            else
                names.push_back(name);
        }
        for (const auto& entry : b.tensors())
            if (!a.tensors().contains(entry.first))
                problems.push_back(fmt::format("{} is in {} only", quoted(entry.first), b_path));
    }
};

Tensor read_doubles(const SafetensorsFile& file, const std::string& name) {
    const StoredTensor& stored = file.tensors().at(name);
    Tensor values({stored.size()}, DType::f64, Device::cpu, Memory::workspace);
    file.read(stored, values);
    return values;
}

std::vector<Deviation> compare_files(const FilePair& files) {
    std::vector<Deviation> list;
    for (const std::string& name : files.names) {
        const Tensor x = read_doubles(files.a, name), y = read_doubles(files.b, name);
        double difference = 0, size = 0, product = 0, rest = 0;
        for (int64_t i = 0; i < x.size(); ++i) {
            const double xi = x.data<double>()[i], yi = y.data<double>()[i];
            difference += (xi - yi) * (xi - yi);
            size += yi * yi;
            product += xi * yi;
        }
        const double multiple = size > 0 ? product / size : 1;
        for (int64_t i = 0; i < x.size(); ++i) {
            const double left = x.data<double>()[i] - multiple * y.data<double>()[i];
            rest += left * left;
        }
        list.push_back({name, relative(std::sqrt(difference), std::sqrt(size)), std::sqrt(size), multiple,
                        relative(std::sqrt(rest), multiple * std::sqrt(size))});
    }
    sort_worst_first(list);
    return list;
}

// The distance between adjacent numbers of a dtype at x.
double spacing(DType dtype, double x) {
    const int digits = dtype == DType::f64 ? 53 : dtype == DType::bf16 ? 8 : 24;
    return x == 0 || !std::isfinite(x) ? 0 : std::ldexp(1.0, std::ilogb(x) + 1 - digits);
}

// AdamW's first step is w <- w - lr (u + decay w) with u = g / (|g| + eps / clip factor), nearly the sign of g. If g is
// almost 0, rounding may flip its sign and move the weight by 2 lr, although the update is correct. Therefore the
// difference that the two gradients explain, lr (u(a) - u(b)), and one spacing of the stored dtype are subtracted from
// the difference of the weights. The rest is relative to the update: 0.1 x std for a wrong decay of 0.1, about 1 for a
// weight that was not updated.
std::vector<Deviation> compare_updates(const Run& run_a, const Run& run_b, const FilePair& initial,
                                       const FilePair& gradients, const FilePair& after, DType dtype) {
    const double step_lr = run_b.steps[0].lr, eps = run_b.flag("eps"), clip = run_b.flag("clip"),
                 mup = run_b.flag("mup");
    const bool explained = std::isfinite(step_lr) && std::isfinite(eps) && std::isfinite(clip);
    const auto direction = [&](double g, const Run& run) {
        const double factor = clip > 0 ? std::min(1.0, clip / (run.steps[0].grad_norm + 1e-6)) : 1;
        return g == 0 ? 0 : g / (std::abs(g) + eps / factor);
    };
    std::vector<Deviation> list;
    for (const std::string& name : after.names) {
        const auto has = [&](const FilePair& files) {
            return std::find(files.names.begin(), files.names.end(), name) != files.names.end();
        };
        if (!has(initial) || !has(gradients)) continue;  // already reported as a problem
        const Tensor b0 = read_doubles(initial.b, name), ga = read_doubles(gradients.a, name),
                     gb = read_doubles(gradients.b, name), x = read_doubles(after.a, name),
                     y = read_doubles(after.b, name);
        if (b0.size() != y.size() || ga.size() != y.size()) continue;
        // muP: the matrices of the blocks have another learning rate.
        const bool scaled = std::isfinite(mup) && name.find(".layers.") != name.npos && y.shape().size() == 2;
        const double lr = scaled ? step_lr * mup / run_b.hidden : step_lr;
        double difference = 0, size = 0;
        for (int64_t i = 0; i < x.size(); ++i) {
            const double xi = x.data<double>()[i], yi = y.data<double>()[i];
            double left = xi - yi;
            if (explained)
                left += lr * (direction(ga.data<double>()[i], run_a) - direction(gb.data<double>()[i], run_b));
            const double rounding = spacing(dtype, std::max(std::abs(xi), std::abs(yi)));
            left = std::isfinite(left) ? std::max(0.0, std::abs(left) - rounding) : NAN;
            difference += left * left;
            size += (yi - b0.data<double>()[i]) * (yi - b0.data<double>()[i]);
        }
        list.push_back({name, relative(std::sqrt(difference), std::sqrt(size)), std::sqrt(size)});
    }
    sort_worst_first(list);
    return list;
}

// Settings that change the numbers, where both runs state them. Flags and keys that a run does not state are its own
// affair.
std::vector<std::string> contradictions(const Run& a, const Run& b) {
    std::vector<std::string> list;
    for (const char* name : {"beta1", "beta2", "eps", "weight-decay", "clip", "z-loss", "mup"}) {
        const double x = a.flag(name), y = b.flag(name);
        if (std::isfinite(x) && std::isfinite(y) && !(std::abs(x - y) <= 1e-6 * std::abs(y)))
            list.push_back(fmt::format("{} is {:g} in {}, {:g} in {}", name, x, a.dir, y, b.dir));
    }
    if (!a.model.is_object() || !b.model.is_object()) return list;
    for (const char* key : {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                            "num_hidden_layers", "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings"})
        if (a.model.contains(key) && b.model.contains(key) && a.model[key] != b.model[key])
            list.push_back(
                fmt::format("{} is {} in {}, {} in {}", key, a.model[key].dump(), a.dir, b.model[key].dump(), b.dir));
    return list;
}

bool made_by_adamw(const Run& run) { return run.flags.value("optimizer", json("adamw")) == "adamw"; }

}  // namespace

Comparison compare_references(const std::string& a, const std::string& b) {
    const Run of_a = read_run(a), of_b = read_run(b);
    Comparison c;
    c.same_dtype = of_a.dtype == of_b.dtype;
    c.dtype = tolerance_of(of_a.dtype) > tolerance_of(of_b.dtype) ? of_a.dtype : of_b.dtype;
    const auto pair = [&](const std::string& name) { return FilePair(a + "/" + name, b + "/" + name, c.problems); };
    const FilePair initial = pair("initial.safetensors"), gradients = pair("gradients.safetensors");
    c.weights = compare_files(initial);
    c.gradients = compare_files(gradients);
    const std::string after = "after_step_1.safetensors";
    bool missing = false;
    for (const Run* run : {&of_a, &of_b}) {
        std::error_code error;
        if (std::filesystem::exists(run->dir + "/" + after, error)) continue;
        missing = true;
        if (run->version > 1) c.problems.push_back(fmt::format("{}/{} is missing", run->dir, after));
    }
    if (!missing) {
        c.check_updates = made_by_adamw(of_a) && made_by_adamw(of_b);
        c.updates = compare_updates(of_a, of_b, initial, gradients, pair(after), c.dtype);
    }
    c.steps = int64_t(std::min(of_a.steps.size(), of_b.steps.size()));
    c.contradictions = contradictions(of_a, of_b);
    if (of_a.steps.size() != of_b.steps.size())
        c.not_checked.push_back(fmt::format("all but the first {} steps: {} has {}, {} has {}", c.steps, a,
                                            of_a.steps.size(), b, of_b.steps.size()));
    if (!c.check_updates) c.not_checked.push_back("the weights after step 1");
    if (c.steps == 1) c.not_checked.push_back("moments, learning rates, zeroed gradients: they show from step 2 on");
    const int64_t checked = c.dtype != DType::f64            ? kCheckedSteps
                            : of_a.gentle() && of_b.gentle() ? kCheckedStepsFp64Gentle
                                                             : kCheckedStepsFp64;
    for (int64_t i = 0; i < c.steps; ++i) {
        const Step &x = of_a.steps[size_t(i)], &y = of_b.steps[size_t(i)];
        const std::string name = fmt::format("step {}", i + 1);
        c.same_tokens = c.same_tokens && x.tokens == y.tokens;
        c.same_targets = c.same_targets && x.targets == y.targets;
        if (std::isfinite(x.lr) && std::isfinite(y.lr) && !(std::abs(x.lr - y.lr) <= 1e-6 * std::abs(y.lr)))
            c.problems.push_back(fmt::format("lr of {} is {:.9g} in {}, {:.9g} in {}", name, x.lr, a, y.lr, b));
        c.samples += int64_t(x.tokens.size());
        (i < checked ? c.losses : c.later_losses)
            .push_back({name, relative(std::abs(x.loss - y.loss), y.loss), y.loss});
        (i < checked ? c.norms : c.later_norms)
            .push_back({name, relative(std::abs(x.grad_norm - y.grad_norm), y.grad_norm), y.grad_norm});
    }
    for (std::vector<Deviation>* list : {&c.losses, &c.norms, &c.later_losses, &c.later_norms}) sort_worst_first(*list);
    return c;
}

double Comparison::default_tolerance() const { return tolerance_of(dtype); }

bool Comparison::within(double tolerance) const { return beyond(tolerance).empty(); }

std::vector<std::string> Comparison::beyond(double tolerance) const {
    std::vector<std::string> lines;
    if (!problems.empty())
        lines.push_back(problems[0] + (problems.size() > 1 ? fmt::format(" (and {} more)", problems.size() - 1) : ""));
    if (!same_tokens) lines.push_back("tokens: the runs trained on different tokens");
    if (same_tokens && !same_targets) lines.push_back("targets: the runs counted different targets");
    // `where`: printed after the name of the largest deviation.
    const auto check = [&](const char* kind, const std::vector<Deviation>& list, double bound, const char* where) {
        const auto count =
            std::count_if(list.begin(), list.end(), [&](const auto& d) { return !(d.relative <= bound); });
        if (count == 0) return;
        lines.push_back(fmt::format("{}: {}{} by {:.3g}, more than {:g} ({} of {} exceed it)", kind, list[0].name,
                                    where, list[0].relative, bound, count, list.size()));
    };
    check("initial weight", weights, same_dtype ? 0 : tolerance, " before step 1");
    check("gradient", gradients, tolerance, " at step 1");
    if (check_updates) check("weight after step 1", updates, kUpdateTolerances * tolerance, "");
    check("loss", losses, tolerance, "");
    check("gradient norm", norms, tolerance, "");
    return lines;
}

std::string comparison_table(const Comparison& c, double tolerance) {
    std::string text;
    for (const std::string& problem : c.problems) text += problem + "\n";
    text += fmt::format("{:<26}{} ({} samples in {} steps)\n", "tokens",
                        !c.same_tokens   ? "differ"
                        : c.same_targets ? "equal"
                                         : "equal, but the targets differ",
                        c.samples, c.steps);
    for (const std::string& each : c.contradictions) text += fmt::format("{:<26}{}\n", "contradiction", each);
    for (const std::string& each : c.not_checked) text += fmt::format("{:<26}{}\n", "not checked", each);
    const auto line = [&](const std::string& what, const std::vector<Deviation>& list) {
        if (list.empty()) return;
        const Deviation& worst = list[0];
        text +=
            fmt::format("{:<26}{}\n", what,
                        worst.relative == 0 ? "equal" : fmt::format("worst {:.3g}, {}", worst.relative, worst.name));
    };
    line("initial weights", c.weights);
    line(c.check_updates ? "weights after step 1" : "weights after it, not checked", c.updates);
    line(fmt::format("losses, steps 1 to {}", c.losses.size()), c.losses);
    line("gradient norms", c.norms);
    line("later losses, not checked", c.later_losses);
    line("later norms, not checked", c.later_norms);
    constexpr size_t kShown = 5;
    const size_t shown = std::min(kShown, c.gradients.size());
    text += fmt::format("\ngradients at step 1, the worst {} of {} parameters\n{:>14}{:>14}   parameter\n", shown,
                        c.gradients.size(), "|a-b| / |b|", "|b|");
    for (size_t i = 0; i < shown; ++i) {
        const Deviation& d = c.gradients[i];
        text += fmt::format("{:>14.3g}{:>14.6g}   {}\n", d.relative, d.size, d.name);
    }
    const std::vector<std::string> beyond = c.beyond(tolerance);
    if (beyond.empty()) {
        text += fmt::format("\nthe runs agree within {:g}", tolerance);
        const std::pair<const char*, const std::vector<Deviation>*> checked[] = {
            {"gradient", &c.gradients}, {"loss", &c.losses}, {"gradient norm", &c.norms}};
        const auto worst = std::max_element(std::begin(checked), std::end(checked), [](const auto& a, const auto& b) {
            const auto largest = [](const auto& kind) {
                return kind.second->empty() ? -1 : (*kind.second)[0].relative;
            };
            return largest(a) < largest(b);
        });
        if (!worst->second->empty())
            text += fmt::format("; largest deviation: {} {} by {:.3g}", worst->first, (*worst->second)[0].name,
                                (*worst->second)[0].relative);
        return text + "\n";
    }
    text += "\nthe runs DIFFER:\n";
    for (const std::string& what : beyond) text += "  " + what + "\n";
    text += "in the order of computation:\n";
    for (const std::string& fact : facts(c, tolerance)) text += "  " + fact + "\n";
    return text;
}

}  // namespace train70b
