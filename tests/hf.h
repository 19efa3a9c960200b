#pragma once
// A small model in a folder of Hugging Face's format.
#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "01_single_gpu/complete/hf/hf.h"
#include "tests/files.h"
#include "tests/support.h"

namespace train70b::test {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

inline LlamaConfig small_config() {
    LlamaConfig c;
    c.layers = 2, c.hidden = 16, c.heads = 4, c.kv_heads = 2, c.ffn = 24, c.vocab = 20, c.context = 7;
    return c;
}

// Experts as Mixtral, Qwen3-MoE and dots.llm1 have them.
inline LlamaConfig mixtral() {
    LlamaConfig c = small_config();
    c.experts = {.count = 4, .top_k = 2, .ffn = 6};
    return c;
}
inline LlamaConfig qwen3_moe() {
    LlamaConfig c = small_config();
    c.qk_norm = true;
    c.experts = {.count = 6, .top_k = 2, .ffn = 10, .dense_layers = 1, .normalize = false};
    return c;
}

// DeepSeek-V3: all layers dense, or experts() beside them.
inline LlamaConfig deepseek(const ExpertsConfig& experts = {}) {
    LlamaConfig c = small_config();
    c.kv_heads = c.heads, c.latent = {.kv_rank = 6, .q_rank = 10, .rope_dim = 2}, c.experts = experts;
    return c;
}

inline LlamaConfig dots1() {
    LlamaConfig c = small_config();
    c.qk_norm = true;
    c.experts = {.count = 8,
                 .top_k = 3,
                 .ffn = 10,
                 .shared = 2,
                 .dense_layers = 1,
                 .sigmoid = true,
                 .scale = 2.5,
                 .groups = 4,
                 .top_groups = 2};
    return c;
}

inline void save(const std::string& dir, Llama& model, int64_t shard_bytes = 5'000'000'000) {
    HfSaver(dir).save(model.config, model.options.dtype, local_full_params(model), shard_bytes);
}

// A valid checkpoint of small_config(), to be damaged.
struct Checkpoint : Folder {
    explicit Checkpoint(int64_t shard_bytes = 5'000'000'000) {
        Llama model(small_config(), {.init_std = 0.3});
        model.materialize(3);
        save(text(), model, shard_bytes);
    }
    ordered_json config() const { return ordered_json::parse(read_text(*this / "config.json")); }
    void set(const std::string& key, const ordered_json& value) const {
        ordered_json json = config();
        json[key] = value;
        write_text(*this / "config.json", json.dump());
    }
    void remove(const std::string& key) const {
        ordered_json json = config();
        json.erase(key);
        write_text(*this / "config.json", json.dump());
    }
    LlamaConfig read() const { return read_hf_config(text()); }
    HfWeights weights() const { return HfWeights(text(), small_config()); }
};

// The bits of every parameter, one after another.
inline std::string bits(Llama& model) {
    std::string all;
    for (const Param* param : model.params()) all.append(param->data.data<char>(), param->data.bytes());
    return all;
}

}  // namespace train70b::test
