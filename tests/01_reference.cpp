// What a reference run holds. tests/test_validate.py has what compares two.
#include <nlohmann/json.hpp>

#include "01_single_gpu/complete/run/outputs.h"
#include "tests/files.h"
#include "tests/support.h"

using namespace train70b;
using namespace train70b::test;
using nlohmann::ordered_json;
namespace fs = std::filesystem;

namespace {

// Three steps of a small model into a folder.
void reference_run(const std::string& to, const std::string& dtype = "fp32", int64_t steps = 3) {
    TrainOptions o;
    o.model.layers = 2, o.model.hidden = 16, o.model.heads = 4, o.model.kv_heads = 2, o.model.ffn = 24;
    o.data = repository_file("docs/data/corpus.txt");
    o.seq_len = 12, o.global_batch = 4, o.micro_batch = 4, o.steps = steps, o.seed = 1, o.init_std = 0.1;
    o.device = "cpu", o.save_reference = to, o.min_lr = 0;
    o.dtype = dtype, o.grad_dtype = dtype == "bf16" ? "bf16" : "fp32";
    const ordered_json flags = {{"seed", "1"}};
    const Dataset data(o.data, o.model.vocab, o.seq_len, 0);
    Llama model(o.model, o.llama());
    model.materialize(o.seed);
    Trainer trainer(o, model, data);
    const RunOutputs outputs(trainer, flags);
    trainer.run();
}

}  // namespace

TEST_CASE("what a reference holds: shapes, tokens, nine digits, the gradients before clipping") {
    const Folder folder;
    reference_run(folder / "a");
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
    EXPECT_USAGE_ERROR(reference_run(folder / "none", "fp32", 0), "--save-reference");
    EXPECT(significant_digits(1.0 / 3, DType::f64) == 1.0 / 3);
    EXPECT(significant_digits(1.0 / 3, DType::f32) == 0.333333333);
}

TEST_CASE("in bf16 the tensors are in bf16") {
    const Folder folder;
    reference_run(folder / "a", "bf16", 1);
    for (const char* name : {"a/gradients.safetensors", "a/after_step_1.safetensors"}) {
        const SafetensorsFile file(folder / name);
        EXPECT(file.tensors().size() == 3 + 9 * 2);
        for (const auto& [_, stored] : file.tensors()) EXPECT(stored.dtype == DType::bf16);
    }
}
