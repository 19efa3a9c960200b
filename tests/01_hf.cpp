// Hugging Face checkpoints: round trips without a bit lost, shards, rope scaling, rectangles, and every bad file
// refused with a line that names it.
#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <numbers>

#include "01_single_gpu/hf/hf.h"
#include "tests/files.h"
#include "tests/support.h"

using namespace train70b;
using namespace train70b::test;
namespace fs = std::filesystem;
using nlohmann::ordered_json;

namespace {

LlamaConfig small_config() {
    LlamaConfig c;
    c.layers = 2, c.hidden = 16, c.heads = 4, c.kv_heads = 2, c.ffn = 24, c.vocab = 20, c.context = 7;
    return c;
}

void save(const std::string& dir, Llama& model, int64_t shard_bytes = 5'000'000'000) {
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
std::string bits(Llama& model) {
    std::string all;
    for (const Param* param : model.params()) all.append(param->data.data<char>(), param->data.bytes());
    return all;
}

}  // namespace

TEST_CASE("save, load, save: identical bytes and identical weights, in one file and in shards") {
    for (DType dtype : {DType::f32, DType::bf16})
        for (int64_t shard_bytes : {int64_t(1) << 40, int64_t(3000)}) {
            Folder first, second;
            Llama model(small_config(), {.dtype = dtype, .init_std = 0.3}), loaded(small_config(), {.dtype = dtype});
            model.materialize(3);
            loaded.materialize(4);
            save(first.text(), model, shard_bytes);
            HfWeights(first.text(), read_hf_config(first.text())).load(loaded.params());
            EXPECT(bits(model) == bits(loaded));
            save(second.text(), loaded, shard_bytes);
            EXPECT(first.files() == second.files());
            EXPECT((shard_bytes == 3000) == fs::exists(first / "model.safetensors.index.json"));
            for (const auto& file : fs::directory_iterator(first.path)) {
                INFO(file.path().filename().string());
                EXPECT(file.path().extension() != ".tmp");
                EXPECT(read_text(file.path()) == read_text(second / file.path().filename().string()));
            }
        }
}

TEST_CASE("shards: at most the size asked for, named and indexed as Hugging Face does") {
    const Checkpoint saved(3000);
    const auto index = ordered_json::parse(read_text(saved / "model.safetensors.index.json"));
    EXPECT(index["metadata"]["total_size"] == 4 * small_config().parameters());
    EXPECT(index["weight_map"].size() == 3 + 9 * 2);
    EXPECT(index["weight_map"]["model.embed_tokens.weight"].get<std::string>().starts_with("model-00001-of-000"));
    std::map<std::string, int64_t> bytes;
    for (const auto& [name, file] : index["weight_map"].items()) {
        const SafetensorsFile shard(saved / file.get<std::string>());
        bytes[file] += shard.tensors().at(name).bytes;
    }
    EXPECT(bytes.size() > 3);
    for (const auto& [file, sum] : bytes) EXPECT(sum <= 3000);
    // One file over shards, and shards over one file: what is read is what was written last.
    Llama model(small_config(), {.init_std = 0.1}), loaded(small_config(), {});
    for (int64_t shard_bytes : {int64_t(1) << 40, int64_t(3000)}) {
        model.materialize(uint64_t(shard_bytes));
        loaded.materialize(1);
        save(saved.text(), model, shard_bytes);
        saved.weights().load(loaded.params());
        EXPECT(bits(model) == bits(loaded));
    }
}

TEST_CASE("a file's dtype becomes the run's: bf16 in fp32 exactly, fp32 in bf16 rounded to nearest") {
    Folder wide, narrow;
    Llama model(small_config(), {.init_std = 0.3}), rounded(small_config(), {.dtype = DType::bf16, .init_std = 0.3});
    model.materialize(3);
    rounded.materialize(3);  // its values are the rounded normals
    save(wide.text(), model);
    save(narrow.text(), rounded);
    Llama from_wide(small_config(), {.dtype = DType::bf16}), from_narrow(small_config(), {});
    from_wide.materialize(9);
    from_narrow.materialize(9);
    HfWeights(wide.text(), small_config()).load(from_wide.params());
    HfWeights(narrow.text(), small_config()).load(from_narrow.params());
    EXPECT(bits(from_wide) == bits(rounded));
    for (size_t i = 0; i < rounded.params().size(); ++i)
        EXPECT(values(from_narrow.params()[i]->data) == values(rounded.params()[i]->data));
}

TEST_CASE("a parameter loads its rectangle of the whole, into a view as well") {
    const Checkpoint saved;
    Llama whole(small_config(), {});
    whole.materialize(1);
    saved.weights().load(whole.params());
    Param up = *whole.blocks[1].unit.params[7];  // mlp.up_proj (24, 16)
    REQUIRE(up.name == "model.layers.1.mlp.up_proj.weight");
    const auto all = values(up.data);
    up.local = {.row_begin = 5, .rows = 7, .col_begin = 3, .cols = 9};
    const Tensor flat({100}, DType::f32, Device::cpu);
    up.data = flat.element_slice(11, up.local_shape());
    saved.weights().load({&up});
    const auto part = values(up.data);
    for (int r = 0; r < 7; ++r)
        for (int c = 0; c < 9; ++c) EXPECT(part[r * 9 + c] == all[(5 + r) * 16 + 3 + c]);
    Param norm = whole.final_norm;
    fill(whole.final_norm.data, 0);
    norm.local = {.row_begin = 4, .rows = 8};
    norm.data = whole.final_norm.data.row_slice(4, 12);
    saved.weights().load({&norm});
    for (int i = 0; i < 16; ++i) EXPECT(values(whole.final_norm.data)[i] == (i >= 4 && i < 12 ? 1 : 0));
}

TEST_CASE("an older file: no num_key_value_heads, no rope_theta, inv_freq tables, unaligned tensors") {
    const Checkpoint saved;
    saved.remove("rope_theta");
    saved.remove("head_dim");
    saved.set("rope_scaling", nullptr);
    EXPECT(saved.read().rope_theta == 10000);
    EXPECT(saved.read().kv_heads == 2);
    saved.remove("num_key_value_heads");
    EXPECT(saved.read().kv_heads == 4);

    const std::string file = read_text(saved / "model.safetensors");
    const uint64_t length = *reinterpret_cast<const uint64_t*>(file.data());
    auto header = ordered_json::parse(file.substr(8, length));
    const std::string data = file.substr(8 + length) + std::string(8, '\0');
    header["model.layers.0.self_attn.rotary_emb.inv_freq"] = {
        {"dtype", "F32"}, {"shape", {2}}, {"data_offsets", {data.size() - 8, data.size()}}};
    std::string text = header.dump();
    if (text.size() % 4 == 0) text += ' ';  // any length is allowed
    const uint64_t new_length = text.size();
    write_text(saved / "model.safetensors", std::string(reinterpret_cast<const char*>(&new_length), 8) + text + data);
    Llama model(small_config(), {.init_std = 0.3}), loaded(small_config(), {});
    model.materialize(3);
    loaded.materialize(4);
    saved.weights().load(loaded.params());
    EXPECT(bits(model) == bits(loaded));
}

TEST_CASE("llama3 rope scaling: long waves slowed down, short ones kept, a blend between; both ways to write it") {
    const Checkpoint saved;
    const ordered_json scaling = {{"rope_type", "llama3"},
                                  {"factor", 8.0},
                                  {"low_freq_factor", 1.0},
                                  {"high_freq_factor", 4.0},
                                  {"original_max_position_embeddings", 8192}};
    saved.set("rope_theta", 500000.0);
    saved.set("rope_scaling", scaling);
    LlamaConfig config = saved.read();
    config.hidden = 128 * config.heads;  // D = 128, as Llama-3.1 has it
    const Rope rope = config.rope();
    int kept = 0, slowed = 0, blended = 0;
    for (int i = 0; i < 64; ++i) {
        const double plain = std::pow(500000.0, -i / 64.0), wavelength = 2 * std::numbers::pi / plain;
        double expected = plain;
        if (wavelength > 8192.0 / 1)
            expected = plain / 8, ++slowed;
        else if (wavelength < 8192.0 / 4)
            ++kept;
        else {
            const double smooth = (8192 / wavelength - 1) / (4 - 1);
            expected = (1 - smooth) * plain / 8 + smooth * plain, ++blended;
        }
        EXPECT(std::abs(rope.inv_freq[i] / expected - 1) <= 1e-12);
    }
    EXPECT(kept > 20);
    EXPECT(slowed > 20);
    EXPECT(blended > 3);

    const LlamaConfig first = saved.read();
    EXPECT(hf_config(first, DType::f32)["rope_scaling"] == scaling);
    saved.remove("rope_scaling");
    saved.remove("rope_theta");
    ordered_json newer = scaling;
    newer["rope_theta"] = 500000.0;
    saved.set("rope_parameters", newer);
    EXPECT(hf_config(saved.read(), DType::f32) == hf_config(first, DType::f32));
    saved.set("rope_parameters", {{"rope_type", "default"}, {"rope_theta", 77.0}});
    EXPECT(saved.read().rope_theta == 77);
    EXPECT(!saved.read().rope_scaling);
}

TEST_CASE("config.json: what is missing, ill-typed or another model is refused by key") {
    const Checkpoint saved;
    for (const char* key : {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
                            "vocab_size", "rms_norm_eps"}) {
        const ordered_json value = saved.config()[key];
        saved.remove(key);
        EXPECT_USAGE_ERROR(saved.read(), (std::string("config.json: ") + key + " is missing").c_str());
        for (const ordered_json& bad : {ordered_json("16"), ordered_json(-16), ordered_json(0), ordered_json(true),
                                        ordered_json({16}), ordered_json(1e300 * 1e300)}) {
            saved.set(key, bad);
            EXPECT_USAGE_ERROR(saved.read(), key);
        }
        saved.set(key, value);
        (void)saved.read();
    }
    const ordered_json good = {{"rope_type", "llama3"},
                               {"factor", 8.0},
                               {"low_freq_factor", 1.0},
                               {"high_freq_factor", 4.0},
                               {"original_max_position_embeddings", 8192}};
    const auto changed = [&](const char* key, const ordered_json& value) {
        ordered_json scaling = good;
        scaling[key] = value;
        return scaling;
    };
    const std::tuple<const char*, ordered_json, const char*> bad[] = {
        {"hidden_size", 16.5, "hidden_size 16.5: must be an integer"},
        {"head_dim", 5, "config.json: head_dim 5: the head size must be even"},
        {"head_dim", 258, "config.json: head_dim 258: the head size must be at most 256"},
        {"num_key_value_heads", 3,
         "num_attention_heads 4 is not divisible by num_key_value_heads 3 (try num_key_value_heads 1)"},
        {"num_hidden_layers", 2000000000, "num_hidden_layers"},
        {"tie_word_embeddings", 1, "tie_word_embeddings 1: must be true or false"},
        {"attention_bias", true, "attention_bias true: a bias of o_proj is not supported"},
        {"mlp_bias", true, "mlp_bias"},
        {"hidden_act", "gelu", "hidden_act \"gelu\""},
        {"model_type", "gemma2", "model_type \"gemma2\""},
        {"model_type", "qwen3_moe", "model_type \"qwen3_moe\""},
        {"model_type", "mistral", "sliding_window is missing, which means 4096"},
        {"num_experts", 8, "num_experts 8: mixtures of experts are not supported"},
        {"num_local_experts", 8, "num_local_experts 8: mixtures of experts are not supported"},
        {"layer_types", {"full_attention", "sliding_attention"}, "layer_types"},
        {"layer_types", "full_attention", "layer_types \"full_attention\": must be a list"},
        {"quantization_config", {{"bits", 4}}, "quantization_config"},
        {"rope_theta", "x", "rope_theta"},
        {"rope_theta", 1e308, "rope_theta 1e+308: must be a number from 1 to 1000000000000"},
        {"rope_theta", 1e-308, "rope_theta 1e-308: must be a number from 1 to"},
        {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 5.0}}, "rope_theta 10000.0: but"},
        {"rope_scaling", 8, "rope_scaling 8: must be an object"},
        {"rope_scaling", {{"type", "dynamic"}, {"factor", 2.0}}, "rope_scaling: type \"dynamic\""},
        {"rope_scaling", {{"rope_type", "yarn"}, {"factor", 2.0}}, "rope_scaling: rope_type \"yarn\""},
        {"rope_scaling", {{"rope_type", "longrope"}}, "rope_scaling: rope_type \"longrope\""},
        {"rope_scaling", {{"type", "linear"}}, "rope_scaling: factor is missing"},
        {"rope_scaling", {{"factor", 2.0}}, "rope_scaling: type is missing"},
        {"rope_scaling", changed("factor", -1), "rope_scaling: factor -1"},
        {"rope_scaling", changed("factor", 1e-300), "rope_scaling: factor 1e-300: must be a number from 1 to 1000000"},
        {"rope_scaling", changed("factor", nullptr), "rope_scaling: factor is missing"},
        {"rope_scaling", changed("low_freq_factor", 4.0), "low_freq_factor 4.0: must be less than high_freq_factor"},
        {"rope_scaling", changed("original_max_position_embeddings", 0.5), "original_max_position_embeddings"},
    };
    for (const auto& [key, value, part] : bad) {
        const Checkpoint damaged;
        damaged.set(key, value);
        INFO(key);
        EXPECT_USAGE_ERROR(damaged.read(), part);
    }
    {
        const Checkpoint damaged;
        damaged.remove("head_dim");
        damaged.set("hidden_size", 18);
        EXPECT_USAGE_ERROR(damaged.read(),
                           "hidden_size 18 is not divisible by num_attention_heads 4 (try hidden_size 20)");
        damaged.set("hidden_size", 16);
        damaged.set("num_attention_heads", 16);
        EXPECT_USAGE_ERROR(damaged.read(), "must be even");
    }
    write_text(saved / "config.json", "{\"hidden_size\": ");
    EXPECT_USAGE_ERROR(saved.read(), "config.json: truncated or corrupt: byte 17 is not valid JSON");
    write_text(saved / "config.json", "[]");
    EXPECT_USAGE_ERROR(saved.read(), "config.json: is not a JSON object");
    write_text(saved / "config.json", nested_lists(200'000));
    EXPECT_USAGE_ERROR(saved.read(), "config.json: nested deeper than 64 levels");
    fs::remove(saved / "config.json");
    EXPECT_USAGE_ERROR(saved.read(), "config.json: cannot be read");
    REQUIRE(mkfifo((saved / "config.json").c_str(), 0600) == 0);
    EXPECT_USAGE_ERROR(saved.read(), "config.json: is not a regular file");
    EXPECT_USAGE_ERROR(read_hf_config(saved / "nowhere"), "nowhere: is not a folder");
}

TEST_CASE("families: written with their own model_type, class and keys, and read again as they were") {
    struct Case {
        const char *type, *architecture;
        LlamaConfig config;
    };
    std::vector<Case> cases = {{"llama", "LlamaForCausalLM", small_config()},
                               {"llama", "LlamaForCausalLM", small_config()},
                               {"mistral", "MistralForCausalLM", small_config()},
                               {"qwen2", "Qwen2ForCausalLM", small_config()},
                               {"qwen3", "Qwen3ForCausalLM", small_config()}};
    cases[1].config.head_size = 6;
    cases[1].config.rope_scaling = RopeScaling{.factor = 3, .linear = true};
    cases[2].config.hidden = 18, cases[2].config.head_size = 4;  // transformers' Llama wants it divisible by the heads
    cases[3].config.qkv_bias = true;
    cases[4].config.qk_norm = true, cases[4].config.head_size = 10;
    for (const auto& [type, architecture, config] : cases) {
        LlamaConfig expected = config;
        expected.family = type;
        EXPECT(hf_config(expected, DType::f32) == hf_config(config, DType::f32));  // what it is written as by itself
        INFO(std::string(type) << ", hidden " << config.hidden << ", heads of " << config.head_dim());
        const ordered_json json = hf_config(config, DType::f32);
        EXPECT(json["model_type"] == type);
        EXPECT(json["architectures"] == ordered_json({architecture}));
        const Folder folder;
        Llama model(config, {.init_std = 0.3});
        model.materialize(3);
        save(folder.text(), model);
        const LlamaConfig again = read_hf_config(folder.text());
        EXPECT(hf_config(again, DType::f32) == json);
        EXPECT(again.head_dim() == config.head_dim());
        EXPECT(again.qkv_bias == config.qkv_bias);
        EXPECT(again.qk_norm == config.qk_norm);
        EXPECT(again.rope().inv_freq[1] == config.rope().inv_freq[1]);
        Llama loaded(again, {});
        loaded.materialize(4);
        HfWeights(folder.text(), again).load(loaded.params());
        EXPECT(bits(model) == bits(loaded));
    }
    {
        LlamaConfig config = small_config();  // that of a Llama, but loaded as Mistral
        config.family = "mistral";
        EXPECT(hf_config(config, DType::f32)["architectures"] == ordered_json({"MistralForCausalLM"}));
        EXPECT(hf_config(parse_hf_config(nlohmann::json::parse(hf_config(config, DType::f32).dump()), "config.json"),
                         DType::f32) == hf_config(config, DType::f32));
    }
    EXPECT(cases[1].config.rope().inv_freq[1] == std::pow(10000.0, -2.0 / 6) / 3);
    const std::map<std::string, Shape> added = {{"model.layers.1.self_attn.q_proj.bias", {16}},
                                                {"model.layers.1.self_attn.k_proj.bias", {8}},
                                                {"model.layers.1.self_attn.v_proj.bias", {8}},
                                                {"model.layers.1.self_attn.q_norm.weight", {10}},
                                                {"model.layers.1.self_attn.k_norm.weight", {10}}};
    size_t found = 0;
    for (const Case& each : {cases[3], cases[4]})
        for (const Param& param : all_params(each.config))
            if (const auto at = added.find(param.name); at != added.end())
                found += param.global_shape == at->second ? 1 : 0;
    EXPECT(found == added.size());
}

TEST_CASE("what a family's config.json leaves out, and which of its keys mean full attention") {
    const auto parse = [](const std::string& type, const ordered_json& changes) {
        ordered_json json = {{"model_type", type},      {"hidden_size", 64}, {"num_attention_heads", 32},
                             {"intermediate_size", 24}, {"vocab_size", 20},  {"num_hidden_layers", 2},
                             {"rms_norm_eps", 1e-6}};
        json.update(changes);
        return parse_hf_config(nlohmann::json::parse(json.dump()), "config.json");
    };
    const ordered_json none = ordered_json::object();
    EXPECT(parse("llama", none).kv_heads == 32);
    EXPECT(parse("llama", none).head_dim() == 2);
    EXPECT(parse("qwen2", none).kv_heads == 32);
    EXPECT(parse("qwen2", none).head_dim() == 2);
    EXPECT(parse("qwen2", {{"num_attention_heads", 64}, {"head_dim", 4}}).kv_heads == 32);
    EXPECT(parse("qwen2", {{"num_key_value_heads", nullptr}}).kv_heads == 32);
    EXPECT(parse("qwen3", none).head_dim() == 128);
    EXPECT(parse("qwen3", none).kv_heads == 32);
    EXPECT(parse("qwen3", none).rope_theta == 10000);
    EXPECT(parse("mistral", {{"sliding_window", nullptr}}).kv_heads == 8);
    EXPECT((parse("qwen2", none).qkv_bias && !parse("qwen2", none).qk_norm));
    EXPECT((!parse("qwen3", none).qkv_bias && parse("qwen3", none).qk_norm));
    EXPECT(parse("qwen2", {{"attention_bias", false}}).qkv_bias);  // a key that Qwen2 does not have

    (void)parse("qwen2", {{"use_sliding_window", false}, {"sliding_window", 4096}, {"max_window_layers", 0}});
    (void)parse("qwen2", {{"use_sliding_window", true}});  // from layer 28 on
    (void)parse("qwen2", {{"use_sliding_window", true}, {"sliding_window", nullptr}, {"max_window_layers", 0}});
    (void)parse("qwen3", {{"use_sliding_window", true},
                          {"max_window_layers", 0},
                          {"layer_types", {"full_attention", "full_attention"}}});
    for (const char* type : {"qwen2", "qwen3"})
        EXPECT_USAGE_ERROR(parse(type, {{"use_sliding_window", true}, {"max_window_layers", 1}}),
                           "use_sliding_window true: sliding-window attention is not supported");
    EXPECT_USAGE_ERROR(parse("qwen2", {{"use_sliding_window", 1}}), "use_sliding_window 1: must be true or false");
    EXPECT_USAGE_ERROR(parse("mistral", {{"sliding_window", 4096}}), "sliding_window 4096: sliding-window attention");
    EXPECT_USAGE_ERROR(parse("qwen3", {{"attention_bias", true}}), "attention_bias true: a bias of o_proj");
    EXPECT_USAGE_ERROR(parse("qwen3", {{"partial_rotary_factor", 0.5}}), "partial_rotary_factor 0.5");
    EXPECT(parse("llama", {{"rope_parameters", {{"rope_type", "linear"}, {"factor", 2}, {"rope_theta", 7}}}})
               .rope_scaling->linear);
}

TEST_CASE("weights that are not this model's are refused before anything is loaded") {
    const Checkpoint saved;
    LlamaConfig config = small_config();
    config.layers = 3;
    EXPECT_USAGE_ERROR(HfWeights(saved.text(), config), "tensor model.layers.2.input_layernorm.weight is missing");
    config.layers = 1;
    EXPECT_USAGE_ERROR(HfWeights(saved.text(), config), "tensor \"model.layers.1.input_layernorm.weight\" is not part");
    config = small_config();
    config.ffn = 32;
    EXPECT_USAGE_ERROR(HfWeights(saved.text(), config),
                       "model.safetensors: tensor model.layers.0.mlp.gate_proj.weight is (24, 16)");
    fs::remove(saved / "model.safetensors");
    EXPECT_USAGE_ERROR(saved.weights(), "has neither model.safetensors nor model.safetensors.index.json");
}

TEST_CASE("tied embeddings: saved without a head; a head that is in the file must be the embedding, bit for bit") {
    LlamaConfig config = small_config();
    config.tied = true;
    Llama model(config, {.init_std = 0.3});
    model.materialize(3);
    Folder folder;
    const auto written = [&](DType head_dtype, const Tensor& head, const std::string& file) {
        std::vector<StoredTensor> entries;
        for (const Param* param : model.params()) entries.push_back({param->name, DType::f32, param->global_shape});
        if (head) entries.push_back({"lm_head.weight", head_dtype, head.shape()});
        SafetensorsWriter writer("--save-hf", folder / file, entries);
        for (const Param* param : model.params()) writer.write(param->data);
        if (head) writer.write(head);
        writer.commit();
    };
    const auto loads = [&] {
        EXPECT(read_hf_config(folder.text()).tied);
        Llama loaded(read_hf_config(folder.text()), {});
        loaded.materialize(9);
        HfWeights(folder.text(), loaded.config).load(loaded.params());
        EXPECT(bits(loaded) == bits(model));
    };
    for (const int64_t shard_bytes : {int64_t(5'000'000'000), int64_t(3000)}) {
        save(folder.text(), model, shard_bytes);
        EXPECT(ordered_json::parse(read_text(folder / "config.json"))["tie_word_embeddings"] == true);
        if (shard_bytes > 3000)
            EXPECT(!SafetensorsFile(folder / "model.safetensors").tensors().contains("lm_head.weight"));
        loads();
    }
    written(DType::f32, model.embed_tokens.data, "model.safetensors");
    loads();
    Tensor other = Tensor::like(model.embed_tokens.data);
    copy(other, model.embed_tokens.data);
    other.data<float>()[other.size() - 1] += 1e-6f;
    written(DType::f32, other, "model.safetensors");
    EXPECT_USAGE_ERROR(HfWeights(folder.text(), config),
                       "model.safetensors: tensor lm_head.weight is not equal to model.embed_tokens.weight, but "
                       "config.json has tie_word_embeddings true");
    written(DType::bf16, model.embed_tokens.data, "model.safetensors");
    EXPECT_USAGE_ERROR(HfWeights(folder.text(), config), "tensor lm_head.weight is bf16 (20, 16) and model.embed");
    written(DType::f32, Tensor({19, 16}, DType::f32, Device::cpu), "model.safetensors");
    EXPECT_USAGE_ERROR(HfWeights(folder.text(), config), "tensor lm_head.weight is fp32 (19, 16) and model.embed");
    written(DType::f32, {}, "model.safetensors");
    config.tied = false;
    EXPECT_USAGE_ERROR(HfWeights(folder.text(), config),
                       "tensor lm_head.weight is missing, but config.json does not have tie_word_embeddings true");
}

TEST_CASE("dimensions whose product overflows are refused by the name of the worst") {
    const auto refused = [](int64_t LlamaConfig::*dim, int64_t value, const char* part) {
        LlamaConfig config;
        config.*dim = value;
        EXPECT_USAGE_ERROR(check_config(config), part);
    };
    refused(&LlamaConfig::vocab, int64_t(1) << 57, "--vocab 144115188075855872: the model would have more than 1e15");
    refused(&LlamaConfig::ffn, int64_t(1) << 57, "--ffn 144115188075855872: the model");
    refused(&LlamaConfig::hidden, int64_t(1) << 62, "--hidden 4611686018427387904: the model");
    refused(&LlamaConfig::layers, INT64_MAX, "--layers 9223372036854775807: the model");
    for (const std::string& name : preset_names())
        if (!preset(name).tied) check_config(preset(name));
}

TEST_CASE("an index and its shards must agree") {
    {
        const Checkpoint saved(3000);
        write_text(saved / "model.safetensors.index.json", nested_lists(200'000));
        EXPECT_USAGE_ERROR(saved.weights(), "index.json: nested deeper than 64 levels");
    }
    const auto damaged = [](const std::function<void(const Checkpoint&, ordered_json& index)>& damage,
                            const char* part) {
        const Checkpoint saved(3000);
        ordered_json index = ordered_json::parse(read_text(saved / "model.safetensors.index.json"));
        damage(saved, index);
        write_text(saved / "model.safetensors.index.json", index.dump());
        EXPECT_USAGE_ERROR(saved.weights(), part);
    };
    const auto shard = [](const ordered_json& index, const std::string& name) -> std::string {
        return index["weight_map"][name];
    };
    const std::string head = "lm_head.weight", table = "model.embed_tokens.weight";
    damaged([&](const Checkpoint& c, ordered_json& index) { fs::remove(c / shard(index, head)); },
            "safetensors: missing; model.safetensors.index.json maps tensor \"");
    damaged([&](const Checkpoint&, ordered_json& index) { index["weight_map"][head] = shard(index, table); },
            "maps to model-00001-of-");
    damaged([&](const Checkpoint&, ordered_json& index) { index["weight_map"].erase(head); },
            "tensor \"lm_head.weight\" is not in model.safetensors.index.json");
    damaged([&](const Checkpoint&, ordered_json& index) { index["weight_map"]["new"] = shard(index, head); },
            "tensor \"new\" is missing");
    damaged([&](const Checkpoint&, ordered_json& index) { index["weight_map"][head] = "../x.safetensors"; },
            "is not the name of a file in this folder");
    damaged([&](const Checkpoint&, ordered_json& index) { index["weight_map"][head] = 3; },
            "is not the name of a file");
    damaged([&](const Checkpoint&, ordered_json& index) { index.erase("weight_map"); }, "weight_map is missing");
    damaged([&](const Checkpoint&, ordered_json& index) { index = 7; }, "weight_map is missing");
    damaged(
        [&](const Checkpoint& c, ordered_json& index) {
            fs::copy(c / shard(index, table), c / "copy.safetensors");
            index["weight_map"]["new"] = "copy.safetensors";
        },
        "is also in");
}

TEST_CASE("output folders: made when missing, gone again when nothing came of it, refused when impossible") {
    const Folder folder;
    { const HfSaver unused(folder / "a/b"); }
    EXPECT(folder.files() == 0);
    write_text(folder / "file", "kept");
    EXPECT_USAGE_ERROR(HfSaver(folder / "file"), "--save-hf");
    EXPECT_USAGE_ERROR(HfSaver(folder / "file/inside"), "cannot be created");
    fs::create_directory(folder / "mine");
    { const HfSaver unused(folder / "mine"); }
    EXPECT(fs::exists(folder / "mine"));
    EXPECT(folder.files() == 2);
}
