// Reference runs: two equal runs compare equal, one altered gradient is named, and nothing that is NaN, missing or
// damaged passes.
#include <cstring>
#include <nlohmann/json.hpp>

#include "01_single_gpu/trainer.h"
#include "tests/files.h"
#include "tests/support.h"

using namespace train70b;
using namespace train70b::test;
namespace fs = std::filesystem;
using nlohmann::ordered_json;

namespace {

// Three steps of a small model with the flags given, into a folder.
void run(const std::string& to, uint64_t seed = 1, int64_t micro_batch = 4, int64_t steps = 3) {
    TrainOptions o;
    o.model.layers = 2, o.model.hidden = 16, o.model.heads = 4, o.model.kv_heads = 2, o.model.ffn = 24;
    o.data = repository_file("01_single_gpu/corpus.txt");
    o.seq_len = 12, o.global_batch = 4, o.micro_batch = micro_batch, o.steps = steps, o.seed = seed, o.init_std = 0.1;
    o.device = "cpu", o.save_reference = to, o.min_lr = 0;
    const Dataset data(o.data, o.model.vocab, o.seq_len, 0);
    Llama model(o.model, o.llama());
    model.materialise(seed);
    Trainer(o, model, data, {{"seed", "1"}}).run();
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
    EXPECT(names ==
           std::vector<std::string>{"config.json", "gradients.safetensors", "initial.safetensors", "reference.json"});
    const auto json = ordered_json::parse(read_text(folder / "a/reference.json"));
    EXPECT(json["seq_len"] == 12);
    EXPECT(json["flags"]["seed"] == "1");
    EXPECT(json["model"] == ordered_json::parse(read_text(folder / "a/config.json")));
    REQUIRE(json["steps"].size() == 3);
    for (const auto& step : json["steps"]) {
        EXPECT(step["tokens"].size() == 4);
        for (const auto& sample : step["tokens"]) EXPECT(sample.size() == 13);
        EXPECT(step["loss"] == nine_digits(step["loss"]));
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
    EXPECT(comparison_table(c, kTolerance).find("worst gradient: " + kName) != std::string::npos);

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
    const auto altered = [&](const std::function<void(ordered_json&)>& alter) {
        fs::remove_all(folder / "b");
        fs::copy(folder / "a", folder / "b");
        auto json = ordered_json::parse(read_text(folder / "b/reference.json"));
        alter(json);
        write_text(folder / "b/reference.json", json.dump());
        return compare_references(folder / "b", folder / "a");
    };
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
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j["steps"] = ordered_json::array(); }), "holds no steps");
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j["version"] = 2; }), "of version 1");
    EXPECT_USAGE_ERROR(altered([](ordered_json& j) { j = 3; }), "of version 1");

    (void)altered([](ordered_json&) {});
    poke(folder / "b/initial.safetensors", kName, 0, [](float w) { return w + 0.01f; });
    EXPECT(compare_references(folder / "b", folder / "a").weights[0].name == kName);
    EXPECT(!compare_references(folder / "b", folder / "a").within(kTolerance));
    fs::remove(folder / "b/gradients.safetensors");
    EXPECT_USAGE_ERROR(compare_references(folder / "b", folder / "a"), "gradients.safetensors: cannot be read");
    EXPECT_USAGE_ERROR(compare_references(folder / "nowhere", folder / "a"), "nowhere/reference.json");
    SafetensorsWriter("--save-reference", folder / "b/gradients.safetensors", {}).commit();
    EXPECT_USAGE_ERROR(compare_references(folder / "b", folder / "a"), "gradients.safetensors: holds no tensors");
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
