// Reference runs: two equal runs compare equal, one altered gradient is named, and nothing that is NaN, missing or
// damaged passes.
#include <cstring>
#include <nlohmann/json.hpp>

#include "01_single_gpu/report/comparison.h"
#include "01_single_gpu/run/outputs.h"
#include "tests/files.h"
#include "tests/support.h"

using namespace train70b;
using namespace train70b::test;
namespace fs = std::filesystem;
using nlohmann::ordered_json;

namespace {

using Change = std::function<void(TrainOptions&)>;

// Three steps of a small model with the flags given, into a folder; `change` alters the run behind its flags' back.
void run(const std::string& to, uint64_t seed = 1, int64_t micro_batch = 4, int64_t steps = 3,
         const Change& change = {}, const Change& hidden = {}) {
    TrainOptions o;
    o.model.layers = 2, o.model.hidden = 16, o.model.heads = 4, o.model.kv_heads = 2, o.model.ffn = 24;
    o.data = repository_file("docs/data/corpus.txt");
    o.seq_len = 12, o.global_batch = 4, o.micro_batch = micro_batch, o.steps = steps, o.seed = seed, o.init_std = 0.1;
    o.device = "cpu", o.save_reference = to, o.min_lr = 0;
    if (change) change(o);
    const ordered_json flags = {{"seed", "1"},
                                {"lr", fmt::format("{}", o.lr)},
                                {"warmup-steps", fmt::format("{}", o.warmup_steps)},
                                {"init-std", fmt::format("{}", o.init_std)},
                                {"eps", fmt::format("{}", o.eps)},
                                {"clip", fmt::format("{}", o.clip)}};
    if (hidden) hidden(o);
    const Dataset data(o.data, o.model.vocab, o.seq_len, 0);
    Llama model(o.model, o.llama());
    model.materialize(seed);
    Trainer trainer(o, model, data);
    const RunOutputs outputs(trainer, flags);
    trainer.run();
}

// A copy of run a under the name b, altered, and compared with a.
Comparison altered(const Folder& folder, const std::function<void(ordered_json&)>& alter) {
    fs::remove_all(folder / "b");
    fs::copy(folder / "a", folder / "b");
    auto json = ordered_json::parse(read_text(folder / "b/reference.json"));
    alter(json);
    write_text(folder / "b/reference.json", json.dump());
    return compare_references(folder / "b", folder / "a");
}

// Replaces element `index` of a stored tensor.
void poke(const std::string& path, const std::string& name, int64_t index, const std::function<float(float)>& change) {
    const int64_t begin = SafetensorsFile(path).tensors().at(name).begin;
    std::string file = read_text(path);
    uint64_t header = 0;
    std::memcpy(&header, file.data(), 8);
    char* at = file.data() + 8 + header + begin + 4 * index;
    float value = 0;
    std::memcpy(&value, at, 4);
    value = change(value);
    std::memcpy(at, &value, 4);
    write_text(path, file);
}

constexpr double kTolerance = 5e-6;
const std::string kName = "model.layers.1.mlp.up_proj.weight";

}  // namespace

TEST_CASE("what a reference holds: shapes, tokens, nine digits, the gradients before clipping") {
    const Folder folder;
    run(folder / "a");
    std::vector<std::string> names;
    for (const auto& file : fs::directory_iterator(folder / "a")) names.push_back(file.path().filename().string());
    std::sort(names.begin(), names.end());
    EXPECT(names == std::vector<std::string>{"after_step_1.safetensors", "config.json", "gradients.safetensors",
                                             "initial.safetensors", "reference.json"});
    const auto json = ordered_json::parse(read_text(folder / "a/reference.json"));
    EXPECT(json["seq_len"] == 12);
    EXPECT(json["flags"]["seed"] == "1");
    EXPECT(json["model"] == ordered_json::parse(read_text(folder / "a/config.json")));
    REQUIRE(json["steps"].size() == 3);
    for (const auto& step : json["steps"]) {
        EXPECT(step["tokens"].size() == 4);
        for (const auto& sample : step["tokens"]) EXPECT(sample.size() == 13);
        EXPECT(step["loss"] == significant_digits(step["loss"]));
    }
    const SafetensorsFile gradients(folder / "a/gradients.safetensors");
    EXPECT(gradients.tensors().size() == 3 + 9 * 2);
    double squares = 0;
    for (const auto& [name, stored] : gradients.tensors()) {
        EXPECT(stored.dtype == DType::f32);
        Tensor values_of(stored.shape, DType::f32, Device::cpu);
        gradients.read(stored, values_of);
        squares += dot(values(values_of), values(values_of));
    }
    EXPECT(std::abs(std::sqrt(squares) / json["steps"][0]["grad_norm"].get<double>() - 1) <= 1e-6);
    EXPECT(std::sqrt(squares) > 1);  // or clipping is not tested
}

TEST_CASE("equal runs are equal, micro-batches agree, another seed does not") {
    const Folder folder;
    run(folder / "a");
    run(folder / "again");
    run(folder / "micro", 1, 1);
    run(folder / "seed", 2);
    run(folder / "longer", 1, 4, 4);
    const Comparison same = compare_references(folder / "a", folder / "again");
    EXPECT(same.within(0));
    EXPECT(same.gradients.size() == 3 + 9 * 2);
    EXPECT(same.samples == 12);
    EXPECT(compare_references(folder / "a", folder / "micro").within(kTolerance));
    EXPECT(!compare_references(folder / "a", folder / "micro").within(0));
    const Comparison other = compare_references(folder / "a", folder / "seed");
    EXPECT(!other.same_tokens);
    EXPECT(!other.within(1e9));
    EXPECT(!compare_references(folder / "a", folder / "longer").within(1e9));
    EXPECT_USAGE_ERROR(run(folder / "none", 1, 4, 0), "--save-reference");
}

TEST_CASE("one altered gradient is named, and by how much; a NaN never passes") {
    const Folder folder;
    run(folder / "a");
    run(folder / "b");
    const std::string gradients = folder / "b/gradients.safetensors";
    poke(gradients, kName, 5, [](float g) { return g + 1e-3f; });
    Comparison c = compare_references(folder / "b", folder / "a");
    EXPECT(!c.within(kTolerance));
    EXPECT(c.gradients[0].name == kName);
    EXPECT(std::abs(c.gradients[0].relative * c.gradients[0].size / 1e-3 - 1) <= 1e-3);
    EXPECT(c.gradients[1].relative == 0);
    REQUIRE(c.beyond(kTolerance).size() == 2);  // and its weight, which does not follow from the gradient
    EXPECT(c.beyond(kTolerance)[1].starts_with("weight after step 1: " + kName));
    EXPECT(comparison_table(c, kTolerance).find("DIFFER:\n  gradient: " + kName + " at step 1 by ") !=
           std::string::npos);

    for (const char* side : {"b", "a"}) {
        poke(folder / (std::string(side) + "/gradients.safetensors"), "lm_head.weight", 7,
             [](float) { return std::nanf(""); });
        for (bool swapped : {false, true}) {
            c = swapped ? compare_references(folder / "a", folder / "b")
                        : compare_references(folder / "b", folder / "a");
            EXPECT(!c.within(1e30));
            EXPECT(c.gradients[0].name == "lm_head.weight");  // worse than the altered one
        }
    }
}

TEST_CASE("an altered weight, token, loss or norm does not pass either") {
    const Folder folder;
    run(folder / "a");
    const auto altered = [&](const auto& alter) { return ::altered(folder, alter); };
    EXPECT(altered([](ordered_json&) {}).within(0));
    EXPECT(altered([](ordered_json& j) {
               j["steps"][2]["loss"] = j["steps"][2]["loss"].get<double>() * (1 + 1e-6);
           }).within(kTolerance));
    const Comparison loss =
        altered([](ordered_json& j) { j["steps"][2]["loss"] = j["steps"][2]["loss"].get<double>() * (1 + 1e-5); });
    EXPECT(!loss.within(kTolerance));
    EXPECT(loss.losses[0].name == "step 3");
    EXPECT(!altered([](ordered_json& j) { j["steps"][1]["grad_norm"] = 0.1; }).within(kTolerance));
    EXPECT(!altered([](ordered_json& j) { j["steps"][1]["grad_norm"] = nullptr; }).within(1e30));
    EXPECT(!altered([](ordered_json& j) { j["steps"][1]["tokens"][3][12] = 0; }).within(1e30));
    EXPECT(!altered([](ordered_json& j) { j["steps"].erase(2); }).within(1e30));
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j["steps"][1].erase("loss"); }), "reference.json: steps[1]");
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j["steps"][1]["loss"] = "x"; }), "reference.json: steps[1]");
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j["steps"][1]["grad_norm"] = -1; }),
                       "steps[1] \"grad_norm\" is -1");
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j["steps"][0]["tokens"][0][0] = 110.9; }), "token 110.9");
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j["steps"] = {{"0", j["steps"][0]}}; }), "\"steps\" must be");
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j["dtype"] = "fp16"; }), "\"dtype\" must be");
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j["steps"] = ordered_json::array(); }), "\"steps\" must be");
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j["version"] = 3; }), "of version 1 or 2");
    write_text(folder / "b/reference.json", nested_lists(200'000));
    EXPECT_USAGE_ERROR(compare_references(folder / "b", folder / "a"), "reference.json: nested deeper than 64");
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j = 3; }), "of version 1");

    (void)altered([](ordered_json&) {});
    poke(folder / "b/initial.safetensors", kName, 0, [](float w) { return w + 0.01f; });
    EXPECT(compare_references(folder / "b", folder / "a").weights[0].name == kName);
    EXPECT(!compare_references(folder / "b", folder / "a").within(kTolerance));
    fs::remove(folder / "b/gradients.safetensors");
    EXPECT_USAGE_ERROR(compare_references(folder / "b", folder / "a"), "gradients.safetensors: cannot be read");
    EXPECT_USAGE_ERROR(compare_references(folder / "nowhere", folder / "a"), "nowhere/reference.json");
    SafetensorsWriter("--save-reference", folder / "b/gradients.safetensors", {}).commit();
    EXPECT_USAGE_ERROR(compare_references(folder / "b", folder / "a"), "gradients.safetensors: has no tensors");
}

TEST_CASE("parameters that only one run has, or in another shape, are named and do not pass") {
    const Folder folder;
    run(folder / "a");
    fs::copy(folder / "a", folder / "b");
    const auto write = [&](std::vector<StoredTensor> list) {
        SafetensorsWriter file("--save-reference", folder / "b/gradients.safetensors", list);
        for (const StoredTensor& stored : list) file.write(Tensor(stored.shape, DType::f32, Device::cpu));
        file.commit();
    };
    write({{"lm_head.weight", DType::f32, {16, 256}}, {"new", DType::f32, {2}}});
    const Comparison c = compare_references(folder / "a", folder / "b");
    EXPECT(!c.within(1e30));
    EXPECT(c.problems.size() == 3 + 9 * 2 + 1);  // 20 missing, one of another shape, one too many
    std::string all;
    for (const std::string& problem : c.problems) all += problem + "\n";
    EXPECT(all.find("\"lm_head.weight\" is (256, 16)") != std::string::npos);
    EXPECT(all.find("\"new\" is in") != std::string::npos);
    EXPECT(all.find("\"" + kName + "\" is in") != std::string::npos);
}

namespace {

// One step, with the flags of run a, from the same weights: what differs is hidden.
Comparison after_one_step(const Change& change, const Change& hidden) {
    const Folder folder;
    run(folder / "a", 1, 4, 1, hidden ? change : Change(), {});
    run(folder / "b", 1, 4, 1, change, hidden);
    return compare_references(folder / "b", folder / "a");
}

// Replaces every weight of a run's file: change(before step 1, after step 1), in the run's dtype.
void replace_weights(const std::string& dir, DType dtype, const std::function<double(double, double)>& change) {
    std::vector<StoredTensor> list;
    std::vector<Tensor> tensors;
    const SafetensorsFile before(dir + "/initial.safetensors"), after(dir + "/after_step_1.safetensors");
    for (const auto& [name, stored] : after.tensors()) {
        Tensor x({stored.size()}, DType::f64, Device::cpu), y = Tensor::like(x);
        before.read(before.tensors().at(name), x);
        after.read(stored, y);
        for (int64_t i = 0; i < y.size(); ++i) y.data<double>()[i] = change(x.data<double>()[i], y.data<double>()[i]);
        list.push_back({name, dtype, stored.shape});
        tensors.push_back(y);
    }
    SafetensorsWriter file("--save-reference", dir + "/after_step_1.safetensors", list);
    for (const Tensor& values : tensors) file.write(values);
    file.commit();
}

bool only_updates_differ(const Comparison& c, double tolerance) {
    const std::vector<std::string> beyond = c.beyond(tolerance);
    INFO(comparison_table(c, tolerance));
    return beyond.size() == 1 && beyond[0].starts_with("weight after step 1: ");
}

}  // namespace

TEST_CASE("weights after step 1: a wrong decay, clipping or master copy does not pass; rounding does") {
    const Change small_step = [](TrainOptions& o) { o.lr = 1e-4; };
    EXPECT(after_one_step(small_step, [](TrainOptions&) {}).within(0));
    EXPECT(only_updates_differ(after_one_step(small_step, [](TrainOptions& o) { o.weight_decay = 0.05; }), kTolerance));
    EXPECT(only_updates_differ(after_one_step(small_step, [](TrainOptions& o) { o.lr *= 1.001; }), kTolerance));
    const Change large_eps = [](TrainOptions& o) { o.eps = 1e-4; };
    EXPECT(only_updates_differ(after_one_step(large_eps, [](TrainOptions& o) { o.clip = 0; }), kTolerance));
    EXPECT(only_updates_differ(after_one_step(large_eps, [](TrainOptions& o) { o.eps = 1e-5; }), kTolerance));

    for (const DType dtype : {DType::f32, DType::bf16}) {
        const Folder folder;
        const Change of_dtype = [&](TrainOptions& o) {
            o.dtype = name_of(dtype), o.grad_dtype = dtype == DType::bf16 ? "bf16" : "fp32";
            o.warmup_steps = 0, o.lr_schedule = "constant";
        };
        run(folder / "a", 1, 4, 1, of_dtype);
        run(folder / "micro", 1, 2, 1, of_dtype);
        const double tolerance = compare_references(folder / "a", folder / "a").default_tolerance();
        EXPECT(tolerance == (dtype == DType::bf16 ? 2e-2 : 5e-6));
        EXPECT(compare_references(folder / "micro", folder / "a").within(tolerance));
        for (const char* name : {"a/gradients.safetensors", "a/after_step_1.safetensors"}) {
            const SafetensorsFile file(folder / name);
            EXPECT(file.tensors().size() == 3 + 9 * 2);
            for (const auto& [_, stored] : file.tensors()) EXPECT(stored.dtype == dtype);
        }
        const auto with = [&](const std::function<double(double, double)>& change) {
            (void)altered(folder, [](ordered_json&) {});
            replace_weights(folder / "b", dtype, change);
            return compare_references(folder / "b", folder / "a");
        };
        EXPECT(with([](double, double after) { return after; }).within(0));
        EXPECT(only_updates_differ(with([](double before, double) { return before; }), tolerance));  // no update
        EXPECT(only_updates_differ(with([](double before, double after) { return after - before; }), tolerance));
        EXPECT(only_updates_differ(with([](double, double) { return NAN; }), tolerance));
    }
}

TEST_CASE("weights after step 1: a gradient that rounding turns round explains its weight, and only that") {
    const Folder folder;
    run(folder / "a", 1, 4, 1);
    const float tiny = 1e-7f;  // of a gradient whose norm is about 1
    const double lr = TrainOptions().lr / TrainOptions().warmup_steps;
    (void)altered(folder, [](ordered_json&) {});
    poke(folder / "a/gradients.safetensors", kName, 5, [&](float) { return tiny; });
    poke(folder / "b/gradients.safetensors", kName, 5, [&](float) { return -tiny; });
    const double norm = ordered_json::parse(read_text(folder / "a/reference.json"))["steps"][0]["grad_norm"];
    const double u = tiny / (tiny + 1e-8 / std::min(1.0, 1 / (norm + 1e-6)));
    poke(folder / "a/after_step_1.safetensors", kName, 5, [&](float) { return float(0.1 - lr * u); });
    poke(folder / "b/after_step_1.safetensors", kName, 5, [&](float) { return float(0.1 + lr * u); });
    EXPECT(compare_references(folder / "b", folder / "a").within(kTolerance));
    poke(folder / "b/gradients.safetensors", kName, 5, [&](float) { return tiny; });
    const Comparison c = compare_references(folder / "b", folder / "a");
    EXPECT(only_updates_differ(c, kTolerance));
    EXPECT(c.updates[0].name == kName);
}

TEST_CASE("the tolerance and the steps that are judged follow the dtype; later drift is told, not judged") {
    const Folder folder;
    run(folder / "a", 1, 4, 5);
    const auto set_loss = [](ordered_json& j, size_t step, double factor) {
        j["steps"][step - 1]["loss"] = j["steps"][step - 1]["loss"].get<double>() * factor;
    };
    Comparison c = altered(folder, [&](ordered_json& j) { set_loss(j, 5, 1.5); });
    EXPECT(c.default_tolerance() == 5e-6);
    EXPECT(c.within(kTolerance));
    EXPECT(std::abs(c.later_losses[0].relative - 0.5) <= 1e-9);
    EXPECT(comparison_table(c, kTolerance).find("worst 0.5, step 5") != std::string::npos);
    c = altered(folder, [&](ordered_json& j) { set_loss(j, 4, 1.5), set_loss(j, 3, 1.25); });
    EXPECT(comparison_table(c, kTolerance)
               .ends_with("DIFFER:\n  loss: step 4 by 0.5, more than 5e-06 (2 of 4 exceed it)\n"));

    // fp64 against fp64: two steps, and all where the flags of both are gentle; fp64 against fp32 is fp32
    auto original = ordered_json::parse(read_text(folder / "a/reference.json"));
    const auto fp64 = [&](double lr, size_t step, double factor, const char* other = "fp64") {
        original["dtype"] = other, original["flags"]["lr"] = fmt::format("{}", lr);
        write_text(folder / "a/reference.json", original.dump());
        return altered(folder, [&](ordered_json& j) { j["dtype"] = "fp64", set_loss(j, step, factor); });
    };
    EXPECT(fp64(3e-3, 2, 1).default_tolerance() == 1e-10);
    EXPECT(fp64(3e-3, 2, 1).within(0));
    for (const double lr : {3e-3, 1e-2}) {
        EXPECT(fp64(lr, 2, 1 + 1e-11).within(1e-10));
        EXPECT(!fp64(lr, 2, 1 + 1e-9).within(1e-10));
    }
    EXPECT(!fp64(3e-3, 3, 1 + 1e-9).within(1e-10));
    EXPECT(!fp64(3e-3, 5, 1 + 1e-9).within(1e-10));
    EXPECT(fp64(1e-2, 3, 1 + 1e-9).within(1e-10));
    original["flags"]["warmup-steps"] = "19";
    EXPECT(fp64(3e-3, 3, 1 + 1e-9).within(1e-10));
    original["flags"]["warmup-steps"] = "20";
    EXPECT(fp64(3e-3, 2, 1 + 1e-9, "fp32").default_tolerance() == 5e-6);
    EXPECT(significant_digits(1.0 / 3, DType::f64) == 1.0 / 3);
    EXPECT(significant_digits(1.0 / 3, DType::f32) == 0.333333333);

    // version 1: without the weights after step 1
    fs::remove(folder / "a/after_step_1.safetensors");
    original["version"] = 1, original["dtype"] = "fp32";
    write_text(folder / "a/reference.json", original.dump());
    EXPECT(altered(folder, [&](ordered_json&) {}).within(0));
}

TEST_CASE("initial weights of one dtype must be equal, whatever the tolerance") {
    const Folder folder;
    run(folder / "a");
    (void)altered(folder, [](ordered_json&) {});
    poke(folder / "b/initial.safetensors", kName, 0, [](float w) { return std::nextafter(w, 1.0f); });
    const Comparison c = compare_references(folder / "b", folder / "a");
    REQUIRE(c.beyond(1).size() == 1);
    EXPECT(c.beyond(1)[0].starts_with("initial weight: " + kName));
}
