#pragma once
// Reference runs of a small model, and altered copies of them.
#include <cstring>
#include <nlohmann/json.hpp>

#include "01_single_gpu/report/facts.h"
#include "01_single_gpu/run/outputs.h"
#include "tests/files.h"
#include "tests/support.h"

namespace train70b::test {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

using AlterOptions = std::function<void(TrainOptions&)>;

// Three steps of a small model with the flags given, into a folder; `change` alters the run behind its flags' back.
inline void reference_run(const std::string& to, uint64_t seed = 1, int64_t micro_batch = 4, int64_t steps = 3,
                          const AlterOptions& change = {}, const AlterOptions& hidden = {}) {
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
inline Comparison altered(const Folder& folder, const std::function<void(ordered_json&)>& alter) {
    fs::remove_all(folder / "b");
    fs::copy(folder / "a", folder / "b");
    auto json = ordered_json::parse(read_text(folder / "b/reference.json"));
    alter(json);
    write_text(folder / "b/reference.json", json.dump());
    return compare_references(folder / "b", folder / "a");
}

// Replaces element `index` of a stored tensor.
inline void poke(const std::string& path, const std::string& name, int64_t index,
                 const std::function<float(float)>& change) {
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

constexpr double kReferenceTolerance = 5e-6;
inline const std::string kAltered = "model.layers.1.mlp.up_proj.weight";

}  // namespace train70b::test
