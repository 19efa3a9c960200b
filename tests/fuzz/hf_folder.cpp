// A Hugging Face folder: config.json and model.safetensors.index.json, beside a shard that belongs to them.
// sources: hf/hf.cpp hf/hf_config.cpp hf/families.cpp hf/safetensors.cpp core/json.cpp core/files.cpp config.cpp
// sources: llama.cpp layers.cpp param.cpp core/tensor.cpp core/memory.cpp core/cuda_absent.cpp core/profile.cpp
// sources: ops/transfer.cpp experts/experts.cpp experts/hf_experts.cpp ops/rope.cpp core/say.cpp
// sources: latent_attention.cpp multi_token.cpp
#include <nlohmann/json.hpp>

#include "01_single_gpu/complete/hf/hf.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/llama.h"

namespace train70b::fuzz {

namespace {
constexpr const char* kShard = "a.safetensors";

// The shard's header and zeros for its tensors.
std::string shard() {
    nlohmann::ordered_json header = nlohmann::ordered_json::object();
    int64_t end = 0;
    for (const Param& param : all_params(small())) {
        const int64_t begin = end;
        end += 4 * param.global_size();
        header[param.name] = {{"dtype", "F32"}, {"shape", param.global_shape}, {"data_offsets", {begin, end}}};
    }
    const std::string text = header.dump();
    const uint64_t length = text.size();
    return std::string(reinterpret_cast<const char*>(&length), 8) + text + std::string(size_t(end), '\0');
}
}  // namespace

// An input is config.json, a zero byte, and the index.
Target target() {
    const auto read = [content = shard()](const Folder& folder, std::string_view input) {
        const size_t cut = input.find('\0');
        folder.write("config.json", input.substr(0, cut));
        folder.write("model.safetensors.index.json", cut == input.npos ? "" : input.substr(cut + 1));
        if (!std::filesystem::exists(folder.path() + "/" + kShard)) folder.write(kShard, content);
        const LlamaConfig config = read_hf_config(folder.path());
        const HfWeights weights(folder.path(), config);
    };
    const nlohmann::ordered_json good = hf_config(small(), DType::f32);
    const std::string config = good.dump();
    nlohmann::ordered_json map = nlohmann::ordered_json::object();
    for (const Param& param : all_params(small())) map[param.name] = kShard;
    const std::string index = R"({"weight_map":)" + map.dump() + "}", zero(1, '\0');
    const auto with = [&](const std::string& from, const std::string& to) {
        std::string changed = config;
        changed.replace(changed.find(from), from.size(), to);
        return changed + zero + index;
    };
    std::vector<std::string> words = {kShard,
                                      "../",
                                      "null",
                                      "NaN",
                                      "1e400",
                                      "-1",
                                      "2147483647",
                                      "18446744073709551615",
                                      "\"weight_map\"",
                                      "\"rope_scaling\"",
                                      "\"rope_parameters\"",
                                      "\"llama3\"",
                                      "\"linear\"",
                                      "\"mistral\"",
                                      "\"qwen2\"",
                                      "\"qwen3\"",
                                      "\"use_sliding_window\"",
                                      "\"sliding_window\"",
                                      "\"max_window_layers\"",
                                      "\"layer_types\"",
                                      "\"full_attention\"",
                                      "\"mixtral\"",
                                      "\"qwen3_moe\"",
                                      "\"num_experts\"",
                                      "\"num_local_experts\"",
                                      "\"num_experts_per_tok\"",
                                      "\"moe_intermediate_size\"",
                                      "\"mlp_only_layers\"",
                                      "\"dots1\"",
                                      "\"n_routed_experts\"",
                                      "\"n_shared_experts\"",
                                      "\"n_group\"",
                                      "\"topk_group\"",
                                      "\"routed_scaling_factor\"",
                                      "\"first_k_dense_replace\"",
                                      "\"rope_type\"",
                                      "\"factor\"",
                                      "\"low_freq_factor\"",
                                      "\"high_freq_factor\"",
                                      "\"original_max_position_embeddings\"",
                                      "\"quantization_config\"",
                                      "[[[[",
                                      "{\"a\":"};
    for (const auto& [key, value] : good.items()) words.push_back('"' + key + '"');
    for (const auto& [name, file] : map.items()) words.push_back('"' + name + '"');
    return {read,
            {config + zero + index,
             config,
             config + zero,
             with("10000.0", "1e400"),
             with("\"rope_scaling\":null",
                  "\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,"
                  "\"high_freq_factor\":4.0,\"original_max_position_embeddings\":8192}"),
             with("\"rope_scaling\":null", "\"rope_scaling\":{\"type\":\"linear\",\"factor\":2.0}"),
             with("\"llama\"", "\"mistral\",\"sliding_window\":null"),
             with("\"llama\"", "\"qwen2\""),
             with("\"llama\"", "\"mixtral\",\"num_local_experts\":2,\"num_experts_per_tok\":1"),
             with("\"llama\"",
                  "\"qwen3_moe\",\"num_experts\":2,\"num_experts_per_tok\":1,\"moe_intermediate_size\":4,"
                  "\"mlp_only_layers\":[]"),
             with("\"llama\"",
                  "\"dots1\",\"n_routed_experts\":4,\"num_experts_per_tok\":1,\"moe_intermediate_size\":4,"
                  "\"n_shared_experts\":1,\"n_group\":2,\"topk_group\":1"),
             with("\"llama\"", "\"qwen2\",\"use_sliding_window\":true,\"max_window_layers\":0"),
             with("\"llama\"", "\"qwen3\",\"layer_types\":[\"full_attention\"]"),
             with("\"rope_scaling\":null", "\"rope_scaling\":" + nested(62)),
             with("\"rope_scaling\":null",
                  "\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":2},"
                  "\"rope_parameters\":{\"rope_type\":\"linear\",\"factor\":2.0,\"rope_theta\":10000}"),
             with("\"llama\"", "\"mistral\",\"sliding_window\":64,\"eos_token_id\":[1,2]"),
             with("\"hidden_size\":8", "\"hidden_size\":2147483647"),
             with("\"num_hidden_layers\":1", "\"num_hidden_layers\":10000"),
             with("false", nested_objects(62)),
             repeat("[", 5000),
             nested_objects(5000),
             config + zero + nested_objects(63),
             config + zero + nested_objects(5000),
             config + zero + R"({"weight_map":{"lm_head.weight":"../../etc/passwd"}})",
             config + zero + R"({"weight_map":{"lm_head.weight":")" + repeat("b", 300) + "\"}}"},
            words};
}

}  // namespace train70b::fuzz
