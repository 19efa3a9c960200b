// Hugging Face checkpoints: round trips without a bit lost, shards, rope scaling, rectangles, and every bad file
// refused with a line that names it.
#include <numbers>

#include "01_single_gpu/complete/experts/experts.h"
#include "tests/hf.h"

using namespace train70b;
using namespace train70b::test;
namespace fs = std::filesystem;
using nlohmann::ordered_json;

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

TEST_CASE("experts: one by one as the Hub has them, or stacked as transformers 5 does; any range of them") {
    for (const LlamaConfig& config : {mixtral(), qwen3_moe(), dots1()}) {
        const bool is_mixtral = config.experts.count == 4;
        const int64_t N = config.experts.count, F = config.experts.ffn;
        Folder hub, stacked;
        Llama model(config, {.init_std = 0.3});
        model.materialize(3);
        save(hub.text(), model, 3000);
        const std::string mlp = is_mixtral ? "model.layers.1.block_sparse_moe." : "model.layers.1.mlp.";
        const std::string expert = mlp + "experts.2.", down = is_mixtral ? "w2" : "down_proj";
        const Experts& experts = *experts_of(model.blocks[1]);
        const auto index = ordered_json::parse(read_text(hub / "model.safetensors.index.json"));
        const auto stored = [&](const std::string& name) {
            INFO(name);
            const SafetensorsFile file(hub / index["weight_map"].at(name).get<std::string>());
            const StoredTensor& tensor = file.tensors().at(name);
            Tensor all(tensor.shape, DType::f32, Device::cpu);
            file.read(tensor, all);
            return values(all);
        };
        const auto rows = [](const Param& param, int64_t begin, int64_t end) {
            return values(param.data.row_slice(begin, end));
        };
        EXPECT(stored(mlp + "gate.weight") == values(experts.router.data));
        EXPECT(stored(expert + (is_mixtral ? "w1" : "gate_proj") + ".weight") ==
               rows(experts.expert_gate_up, 4 * F, 5 * F));
        EXPECT(stored(expert + (is_mixtral ? "w3" : "up_proj") + ".weight") ==
               rows(experts.expert_gate_up, 5 * F, 6 * F));
        EXPECT(stored(expert + down + ".weight") == rows(experts.expert_down, 2 * 16, 3 * 16));

        std::vector<StoredTensor> entries;
        for (const Param* param : model.params()) {
            const HfTensor tensor = hf_stacked(*param, config);
            entries.push_back({tensor.name, DType::f32, tensor.shape});
            if (param == &experts.expert_down) EXPECT(tensor.shape == Shape{N, 16, F});
        }
        const size_t of_weights = entries.size();
        if (config.experts.sigmoid) entries.push_back({experts.buffer_name(), DType::f32, {N}});
        const auto write_all = [&](SafetensorsWriter& writer) {
            for (const Param* param : model.params()) writer.write(param->data);
            if (config.experts.sigmoid) writer.write(buffer_tensor(experts, Device::cpu));
        };
        SafetensorsWriter writer("--save-hf", stacked / "model.safetensors", entries);
        write_all(writer);
        writer.commit();
        write_text(stacked / "config.json", read_text(hub / "config.json"));
        for (const std::string& folder : {hub.text(), stacked.text()}) {
            const HfWeights weights(folder, read_hf_config(folder));
            Llama loaded(read_hf_config(folder), {});
            loaded.materialize(4);
            weights.load(loaded.params());
            EXPECT(bits(loaded) == bits(model));
            // Experts 1 and 2 of this rank, a part of the columns, and a range that begins inside an expert.
            for (const Rect& part : {Rect{2 * F, 4 * F, 0, 16}, Rect{2 * F, 4 * F, 3, 5}, Rect{F - 1, 2 * F, 0, 16}}) {
                Param mine = experts.expert_gate_up;
                mine.local = part;
                mine.data = Tensor(mine.local_shape(), DType::f32, Device::cpu);
                weights.load({&mine});
                const auto whole = values(experts.expert_gate_up.data), got = values(mine.data);
                for (int64_t r = 0; r < part.rows; ++r)
                    for (int64_t c = 0; c < part.cols; ++c)
                        EXPECT(got[size_t(r * part.cols + c)] ==
                               whole[size_t((part.row_begin + r) * 16 + part.col_begin + c)]);
            }
        }
        entries[of_weights - 1].name = "x";
        entries.push_back({expert + down + ".weight", DType::f32, {16, F}});  // of both kinds
        SafetensorsWriter both("--save-hf", stacked / "model.safetensors", entries);
        write_all(both);
        both.write(experts.expert_down.data.row_slice(0, 16));
        both.commit();
        EXPECT_USAGE_ERROR(HfWeights(stacked.text(), config), "tensor");
        fs::remove(hub / index["weight_map"].at(expert + down + ".weight").get<std::string>());
        EXPECT_USAGE_ERROR(HfWeights(hub.text(), config), "missing");
    }
}

TEST_CASE("a sigmoid router's bias: saved in fp32 behind its router, loaded, 0 if there is none yet") {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f64}) {
        Folder folder;
        Llama model(dots1(), {.dtype = dtype, .init_std = 0.3});
        model.materialize(3);
        const std::string name = "model.layers.1.mlp.gate.e_score_correction_bias";
        const std::vector<float> bias = {0.1f, -0.2f, 1e-7f, 0, 5, -0.3f, 0.01f, 1};
        EXPECT(experts_of(model.blocks[1])->bias() == std::vector<float>(8, 0.0f));  // not empty: checkpoints have it
        for (const std::vector<float>& stored : {std::vector<float>(8, 0.0f), bias}) {
            if (stored[0] != 0) experts_of(model.blocks[1])->set_bias(stored);
            save(folder.text(), model);
            const SafetensorsFile file(folder / "model.safetensors");
            EXPECT(file.tensors().at(name).dtype == DType::f32);
            EXPECT(file.tensors().at(name).shape == Shape{8});
            EXPECT(!file.tensors().contains("model.layers.0.mlp.gate.e_score_correction_bias"));  // a dense layer
            Llama loaded(read_hf_config(folder.text()), {.dtype = dtype});
            loaded.materialize(4);
            const HfWeights weights(folder.text(), loaded.config);
            weights.load(loaded.params());
            weights.load_buffers(loaded);
            EXPECT(bits(loaded) == bits(model));
            EXPECT(experts_of(loaded.blocks[1])->bias() == stored);
        }
        size_t gradients = 0;
        for_full_tensors(model.config, Which::grad, local_full_params(model),
                         [&](const std::string& each, const Tensor&) { gradients += is_buffer(each) ? 1 : 0; });
        EXPECT(gradients == 0);
        for (const float value : {std::nanf(""), -INFINITY}) {  // only the choice of experts would show it
            experts_of(model.blocks[1])->set_bias({0, 0, 0, value, 0, 0, 0, 0});
            const Folder other;
            save(other.text(), model);
            EXPECT_USAGE_ERROR(HfWeights(other.text(), model.config), (name + " has ").c_str());
        }

        const SafetensorsFile file(folder / "model.safetensors");
        std::vector<StoredTensor> entries;
        for (const auto& [each, tensor] : file.tensors())
            if (each != name) entries.push_back({each, tensor.dtype, tensor.shape});
        SafetensorsWriter writer("--save-hf", folder / "model.safetensors", entries);
        for (const StoredTensor& tensor : entries) {
            Tensor all(tensor.shape, tensor.dtype, Device::cpu);
            file.read(file.tensors().at(tensor.name), all);
            writer.write(all);
        }
        writer.commit();
        EXPECT_USAGE_ERROR(HfWeights(folder.text(), model.config), (name + " is missing").c_str());
    }
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
    const auto copy_of_table = [&](const Checkpoint& c, ordered_json& index) {  // two shards have it
        fs::copy(c / shard(index, table), c / "copy.safetensors");
        index["weight_map"][table] = "copy.safetensors";
    };
    damaged(
        [&](const Checkpoint& c, ordered_json& index) {
            copy_of_table(c, index);
            std::string content = read_text(c / "copy.safetensors");
            content.back() ^= 1;
            write_text(c / "copy.safetensors", content);
        },
        "is also in");
    const Checkpoint saved(3000);
    ordered_json index = ordered_json::parse(read_text(saved / "model.safetensors.index.json"));
    copy_of_table(saved, index);
    write_text(saved / "model.safetensors.index.json", index.dump());
    Llama model(small_config(), {.init_std = 0.3}), loaded(small_config(), {});
    model.materialize(3);
    loaded.materialize(4);
    saved.weights().load(loaded.params());
    EXPECT(bits(model) == bits(loaded));
}

TEST_CASE("fp16: read exactly; also a tied head") {
    Folder folder;
    Llama model(small_config(), {.dtype = DType::bf16, .init_std = 0.3}), loaded(small_config(), {});
    model.materialize(3);
    loaded.materialize(4);
    save(folder.text(), model);
    EXPECT(HfWeights(folder.text(), small_config()).dtypes() == "bf16");
    std::string file = read_text(folder / "model.safetensors");
    for (size_t at = 0; (at = file.find("\"BF16\"", at)) != file.npos;) file.replace(at, 6, "\"F16\" ");
    write_text(folder / "model.safetensors", file);
    const HfWeights weights(folder.text(), small_config());
    EXPECT(weights.dtypes() == "fp16");
    weights.load(loaded.params());
    for (size_t i = 0; i < model.params().size(); ++i) {
        const uint16_t* stored = model.params()[i]->data.data<uint16_t>();
        const std::vector<double> found = values(loaded.params()[i]->data);
        for (size_t k = 0; k < found.size(); ++k) EXPECT(found[k] == fp16_value(stored[k]));
    }
}

TEST_CASE("weights that are not finite, or not in the run's dtype, are refused by name when they are loaded") {
    for (const auto& [stored, run, value] : {std::tuple{DType::f32, DType::f32, double(NAN)},
                                             {DType::bf16, DType::f32, double(INFINITY)},
                                             {DType::f64, DType::f32, 1e300},
                                             {DType::f32, DType::bf16, 3.4e38},
                                             {DType::f64, DType::f64, 1e300}}) {
        Folder folder;
        Llama model(small_config(), {.dtype = stored, .init_std = 0.3}), loaded(small_config(), {.dtype = run});
        model.materialize(3);
        loaded.materialize(4);
        const int64_t last = model.embed_tokens.data.size() - 1;  // of a token that no text may have
        Tensor place = model.embed_tokens.data.element_slice(last, {1});
        fill(place, value);
        save(folder.text(), model);
        const HfWeights weights(folder.text(), small_config());
        if (run == DType::f64)
            weights.load(loaded.params());
        else
            EXPECT_USAGE_ERROR(weights.load(loaded.params()),
                               "model.safetensors: tensor model.embed_tokens.weight has ");
    }
}

TEST_CASE("folders of other formats, and names that a wrapper changed, are refused with what to do") {
    for (const auto& [file, advice] : {std::pair{"pytorch_model.bin", "safe_serialization=True"},
                                       {"pytorch_model.bin.index.json", "safe_serialization=True"},
                                       {"adapter_config.json", "an adapter: merge it first, with merge_and_unload()"},
                                       {"consolidated.00.pth", "another format"}}) {
        const Checkpoint saved;
        write_text(saved / file, "");
        (void)saved.read();  // beside model.safetensors it does not matter
        fs::remove(saved / "model.safetensors");
        EXPECT_USAGE_ERROR(saved.read(), file);
        EXPECT_USAGE_ERROR(saved.read(), advice);
    }
    const auto renamed = [](const std::function<std::string(std::string)>& rename) {
        auto folder = std::make_unique<Folder>();
        std::vector<StoredTensor> entries;
        for (const Param& param : all_params(small_config()))
            entries.push_back({rename(param.name), DType::f32, param.global_shape});
        SafetensorsWriter writer("--save-hf", *folder / "model.safetensors", entries);
        for (const StoredTensor& entry : entries) writer.write(Tensor(entry.shape, DType::f32, Device::cpu));
        writer.commit();
        return folder;
    };
    const auto bare = renamed([](const std::string& name) { return name.substr(name.starts_with("model.") ? 6 : 0); });
    EXPECT_USAGE_ERROR(HfWeights(bare->text(), small_config()),
                       "model.embed_tokens.weight is missing, but embed_tokens.weight is there: of a LlamaModel");
    const auto compiled = renamed([](const std::string& name) { return "_orig_mod." + name; });
    EXPECT_USAGE_ERROR(HfWeights(compiled->text(), small_config()), "the wrapper's prefix _orig_mod. is in the way");
    const auto blocks = renamed([](std::string name) {
        const size_t at = name.find("self_attn.");
        return at == name.npos ? name : name.insert(at, "_orig_mod.");
    });
    EXPECT_USAGE_ERROR(HfWeights(blocks->text(), small_config()),
                       "\"model.layers.0._orig_mod.self_attn.q_proj.weight\"");
}

TEST_CASE("tokenizer and generation_config.json of the loaded folder are saved with the model") {
    const Checkpoint from;
    const Folder to;
    for (const char* name : {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
                             "vocab.json", "merges.txt", "generation_config.json"})
        write_text(from / name, std::string("of ") + name);
    write_text(from / "README.md", "");
    Llama model(small_config(), {.init_std = 0.3});
    model.materialize(3);
    HfSaver(to.text(), from.text()).save(model.config, DType::f32, local_full_params(model));
    EXPECT(to.files() == from.files() - 1);
    EXPECT(read_text(to / "tokenizer.model") == "of tokenizer.model");
    fs::remove(from / "vocab.json");
    REQUIRE(mkfifo((from / "vocab.json").c_str(), 0600) == 0);
    EXPECT_USAGE_ERROR(HfSaver(to.text(), from.text()), "vocab.json: is not a regular file");
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
