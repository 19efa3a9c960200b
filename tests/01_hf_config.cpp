// config.json: rope scaling, families of models, and what is refused by key.
#include <numbers>

#include "01_single_gpu/core/files.h"
#include "01_single_gpu/core/random.h"
#include "tests/hf.h"

using namespace train70b;
using namespace train70b::test;

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
    for (const char* key :
         {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"}) {
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
        {"mlp_bias", true, "mlp_bias true: is not supported"},
        {"attention_dropout", 0.1,
         "attention_dropout 0.1: is not supported (--hf-ignore attention_dropout leaves it out)"},
        {"sliding_window", 4096, "sliding_window 4096: is not supported"},  // of a Llama
        {"hidden_act", "gelu", "hidden_act \"gelu\""},
        {"model_type", "gemma2", "model_type \"gemma2\""},
        {"model_type", "qwen3_moe", "num_experts is missing"},
        {"model_type", "qwen2_moe", "model_type \"qwen2_moe\""},
        {"num_experts", 8, "num_experts 8: is not supported"},
        {"rms_norm_eps", "x", "rms_norm_eps \"x\": must be a number"},
        {"rms_norm_eps", 0, "rms_norm_eps 0: must be a number from 1e-30 to 1"},
        {"rms_norm_eps", 3.5, "rms_norm_eps 3.5: must be a number from 1e-30 to 1"},
        {"rms_norm_eps", 1e308, "rms_norm_eps 1e+308: must be a number from 1e-30 to 1"},
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
        {"rope_scaling", {{"type", "linear"}, {"rope_type", "default"}}, "type \"linear\": conflicts with rope_type"},
        {"rope_scaling",
         {{"type", "default"}, {"mrope_section", {2, 1, 1}}},
         "rope_scaling: mrope_section [2,1,1]: is not supported (--hf-ignore rope_scaling.mrope_section leaves it "
         "out)"},
        {"rope_parameters",
         {{"full_attention", {{"rope_type", "default"}, {"rope_theta", 1e6}}}},
         "rope_parameters: full_attention {\"rope_theta\":1000000.0,\"rope_type\":\"default\"}: only one set"},
        {"rope_scaling", changed("high_freq_factor", 1e300), "high_freq_factor 1e+300: must be a number from 1e-06 to"},
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
    {  // both versions: equal, or not
        const Checkpoint both;
        both.set("rope_scaling", {{"type", "linear"}, {"factor", 2}});
        both.set("rope_parameters", {{"rope_type", "linear"}, {"factor", 2.0}, {"rope_theta", 10000}});
        EXPECT(both.read().rope_scaling == RopeScaling{.factor = 2, .linear = true});
        both.set("rope_parameters", {{"rope_type", "linear"}, {"factor", 4.0}});
        EXPECT_USAGE_ERROR(both.read(),
                           "rope_scaling {\"factor\":2,\"type\":\"linear\"}: conflicts with rope_parameters");
        both.set("rope_parameters", {{"rope_type", "default"}});
        EXPECT_USAGE_ERROR(both.read(), "conflicts with rope_parameters");
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
                               {"qwen3", "Qwen3ForCausalLM", small_config()},
                               {"mixtral", "MixtralForCausalLM", mixtral()},
                               {"qwen3_moe", "Qwen3MoeForCausalLM", qwen3_moe()},
                               {"dots1", "Dots1ForCausalLM", dots1()},
                               {"deepseek_v3", "DeepseekV3ForCausalLM", deepseek()},
                               {"deepseek_v3", "DeepseekV3ForCausalLM", deepseek(dots1().experts)}};
    cases.back().config.latent.q_rank = 0, cases.back().config.head_size = 6;
    cases[1].config.head_size = 6;
    cases[1].config.rope_scaling = RopeScaling{.factor = 3, .linear = true};
    cases[2].config.hidden = 18, cases[2].config.head_size = 4;  // transformers' Llama wants it divisible by the heads
    cases[2].config.window = 5, cases[2].config.windowed = {false, true}, cases[2].config.sinks = true;
    cases[3].config.qkv_bias = true, cases[3].config.window = 7;
    cases[4].config.qk_norm = true, cases[4].config.head_size = 10;
    cases[4].config.window = 6, cases[4].config.windowed = {true, false};
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
        EXPECT((again.window == config.window && again.windowed == config.windowed && again.sinks == config.sinks));
        EXPECT(again.latent == config.latent);
        EXPECT(again.experts.count == config.experts.count);
        EXPECT(again.experts.normalize == config.experts.normalize);
        EXPECT(again.experts.dense_layers == config.experts.dense_layers);
        EXPECT(again.experts.sigmoid == config.experts.sigmoid);
        EXPECT(again.experts.shared == config.experts.shared);
        EXPECT(again.experts.scale == config.experts.scale);
        EXPECT(again.experts.groups == config.experts.groups);
        EXPECT(again.experts.top_groups == config.experts.top_groups);
        EXPECT(again.rope().inv_freq[1] == config.rope().inv_freq[1]);
        Llama loaded(again, {});
        loaded.materialize(4);
        HfWeights(folder.text(), again).load(loaded.params());
        EXPECT(bits(model) == bits(loaded));
    }
    for (const LlamaConfig& config :
         {deepseek(), small_config()}) {  // tensors of one layer more: a module of DeepSeek-V3
        LlamaConfig longer = config;
        ++longer.layers;
        const Folder folder;
        Llama model(longer, {.init_std = 0.3}), shorter(config, {});
        model.materialize(3);
        shorter.materialize(4);
        save(folder.text(), model);
        if (config.latent.kv_rank == 0) {
            EXPECT_USAGE_ERROR(HfWeights(folder.text(), config), "is not part of this model");
            continue;
        }
        HfWeights(folder.text(), config).load(shorter.params());
        for (Param* param : shorter.blocks[1].unit.params)
            EXPECT(values(param->data) == values(local_full_params(model)(*param, Which::data)));
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

TEST_CASE("experts: the Hub's keys, and what they must not say") {
    const auto parse = [](const LlamaConfig& config, const ordered_json& changes) {
        ordered_json json = hf_config(config, DType::f32);
        json.update(changes);
        return parse_hf_config(nlohmann::json::parse(json.dump()), "config.json");
    };
    const ordered_json one = hf_config(mixtral(), DType::f32), other = hf_config(qwen3_moe(), DType::f32);
    EXPECT((one["num_local_experts"] == 4 && one["intermediate_size"] == 6 && !one.contains("moe_intermediate_size")));
    EXPECT((other["num_experts"] == 6 && other["moe_intermediate_size"] == 10 && other["intermediate_size"] == 24));
    EXPECT((other["norm_topk_prob"] == false && other["mlp_only_layers"] == ordered_json::array({0})));
    const ordered_json sigmoid = hf_config(dots1(), DType::f32);
    EXPECT((sigmoid["n_routed_experts"] == 8 && sigmoid["moe_intermediate_size"] == 10));
    EXPECT((sigmoid["n_shared_experts"] == 2 && sigmoid["first_k_dense_replace"] == 1 && sigmoid["n_group"] == 4));
    ordered_json renamed = other;
    renamed.erase("num_experts");
    renamed.erase("norm_topk_prob");
    renamed["num_local_experts"] = 6;  // as transformers 5 may write it
    EXPECT(hf_config(parse_hf_config(nlohmann::json::parse(renamed.dump()), "config.json"), DType::f32) == other);
    const std::tuple<LlamaConfig, const char*, ordered_json, const char*> bad[] = {
        {mixtral(), "num_experts", 4, "num_experts 4: conflicts with num_local_experts"},
        {mixtral(), "num_local_experts", nullptr, "num_local_experts is missing"},
        {mixtral(), "num_experts_per_tok", 5, "num_experts_per_tok 5 must be at most num_local_experts 4"},
        {mixtral(), "num_experts_per_tok", 0, "num_experts_per_tok 0: must be an integer"},
        {mixtral(), "router_jitter_noise", 0.1, "router_jitter_noise 0.1: only 0.0"},
        {mixtral(), "router_aux_loss_coef", -1, "router_aux_loss_coef -1: must be a number from 0 to"},
        {mixtral(), "router_aux_loss_coef", 1e300, "router_aux_loss_coef 1e+300: must be a number from 0 to 1000000"},
        {qwen3_moe(), "num_experts_per_tok", 7, "num_experts_per_tok 7 must be at most num_experts 6"},
        {qwen3_moe(), "moe_intermediate_size", nullptr, "moe_intermediate_size is missing"},
        {qwen3_moe(), "norm_topk_prob", 1, "norm_topk_prob 1: must be true or false"},
        {qwen3_moe(), "decoder_sparse_step", 2, "decoder_sparse_step 2: only 1"},
        {qwen3_moe(), "mlp_only_layers", 0, "mlp_only_layers 0: must be a list"},
        {qwen3_moe(), "mlp_only_layers", {1}, "mlp_only_layers [1]: must be [], or the first layers"},
        {qwen3_moe(), "mlp_only_layers", {0, 0}, "mlp_only_layers [0,0]: must be [], or the first layers"},
        {qwen3_moe(), "mlp_only_layers", {0.5}, "mlp_only_layers [0.5]: must be a list of integers"},
        {qwen3_moe(), "mlp_only_layers", {0, 1}, "mlp_only_layers of length 2 must be less than num_hidden_layers 2"},
        {qwen3_moe(), "num_experts", 100'001, "num_experts 100001: must be an integer from 1 to 100000"},
        {dots1(), "num_local_experts", 8, "num_local_experts 8: conflicts with n_routed_experts"},
        {dots1(), "n_routed_experts", nullptr, "n_routed_experts is missing"},
        {dots1(), "n_routed_experts", 10, "n_routed_experts 10 is not divisible by n_group 4"},
        {dots1(), "n_routed_experts", 2, "n_group 4: needs two experts or more per group, but there are 2"},
        {dots1(), "n_shared_experts", nullptr, "n_shared_experts is missing"},
        {dots1(), "topk_group", 5, "topk_group 5 must be at most n_group 4"},
        {dots1(), "num_experts_per_tok", 5, "num_experts_per_tok 5: the best 2 of 4 groups have 4 experts"},
        {dots1(), "routed_scaling_factor", 1e38, "routed_scaling_factor 1e+38: must be a number from 1e-06 to"},
        {dots1(), "routed_scaling_factor", 0, "routed_scaling_factor 0: must be a number from 1e-06 to"},
        {dots1(), "first_k_dense_replace", 2, "first_k_dense_replace 2 must be less than num_hidden_layers 2"},
        {dots1(), "scoring_func", "softmax", "scoring_func \"softmax\": is unknown"},
        {dots1(), "topk_method", "greedy", "topk_method \"greedy\": only"},
        {dots1(), "moe_layer_freq", 2, "moe_layer_freq 2: only 1"},
        {dots1(), "attention_bias", true, "attention_bias true: a bias of o_proj"},
        {dots1(), "layer_types", {"full_attention", "sliding_attention"}, "\"sliding_attention\" and its window"},
        {small_config(), "n_routed_experts", 8, "n_routed_experts 8: is not supported"},
    };
    for (const auto& [config, key, value, part] : bad) {
        INFO(key);
        EXPECT_USAGE_ERROR(parse(config, {{key, value}}), part);
    }
    const auto refused = [](const std::function<void(LlamaConfig&)>& change, const char* part) {
        LlamaConfig config = mixtral();
        change(config);
        EXPECT_USAGE_ERROR(check_hf_family(config, "--save-hf"), part);
    };
    for (const LlamaConfig& config : {small_config(), mixtral(), qwen3_moe(), dots1()})
        check_hf_family(config, "--save-hf");
    refused([](LlamaConfig& c) { c.qkv_bias = true; },
            "--save-hf: no family of Hugging Face has experts with --qkv-bias");
    refused([](LlamaConfig& c) { c.experts.sigmoid = true; },
            "--router sigmoid, --qk-norm off and --shared-experts 0 (try --qk-norm on --shared-experts 1");
    refused([](LlamaConfig& c) { c = dots1(), c.experts.shared = 0; },
            "--qk-norm on and --shared-experts 0 (try --qk-norm on --shared-experts 1");
    refused([](LlamaConfig& c) { c = dots1(), c.experts.groups = 8; }, "--expert-groups 8, one expert in each,");
    refused([](LlamaConfig& c) { c.experts.shared = 1; }, "--shared-experts 1");
    refused([](LlamaConfig& c) { c.experts.groups = 2; }, "--expert-groups 2");
    refused([](LlamaConfig& c) { c.experts.scale = 2.5; }, "--router-scale 2.5");
    refused([](LlamaConfig& c) { c.experts.normalize = false; }, "(try --qk-norm on");
    refused([](LlamaConfig& c) { c.experts.dense_layers = 1; }, "--dense-layers 1 and --qk-norm off (try --qk-norm on");
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
    for (const char* type : {"qwen2", "qwen3"}) {
        EXPECT(parse(type, {{"use_sliding_window", true}, {"max_window_layers", 2}}).window == 0);
        const LlamaConfig after = parse(type, {{"use_sliding_window", true}, {"max_window_layers", 1}});
        EXPECT((after.window == 4096 && !after.has_window(0) && after.has_window(1)));
        const ordered_json second = {"full_attention", "sliding_attention"};
        const ordered_json by_layer = {
            {"use_sliding_window", true}, {"sliding_window", 8}, {"max_window_layers", 9}, {"layer_types", second}};
        EXPECT((parse(type, by_layer).window == 8 && parse(type, by_layer).windowed == std::vector<bool>{false, true}));
        const ordered_json written = hf_config(parse(type, by_layer), DType::f32);
        for (const auto& [key, value] : by_layer.items()) EXPECT(written[key] == value);
    }
    const ordered_json experts = {
        {"n_routed_experts", 8}, {"num_experts_per_tok", 2}, {"moe_intermediate_size", 6}, {"n_shared_experts", 1}};
    const auto dots = [&](const ordered_json& changes) {
        ordered_json all = experts;
        all.update(changes);
        return parse("dots1", all);
    };
    const ExpertsConfig x = dots(none).experts;  // max_window_layers is 62
    EXPECT((x.sigmoid && !x.normalize && x.groups == 1 && x.top_groups == 1 && x.scale == 1 && x.dense_layers == 0));
    EXPECT((dots(none).kv_heads == 32 && dots(none).qk_norm));
    (void)dots({{"max_window_layers", 1}, {"sliding_window", nullptr}});
    (void)dots(
        {{"scoring_func", "noaux_tc"}, {"topk_method", "noaux_tc"}, {"n_group", nullptr}, {"topk_group", nullptr}});
    EXPECT(dots({{"max_window_layers", 1}}).window == 4096);
    EXPECT(dots({{"max_window_layers", 1}, {"sliding_window", 8}}).window == 8);
    EXPECT_USAGE_ERROR(parse("qwen2", {{"use_sliding_window", 1}}), "use_sliding_window 1: must be true or false");
    EXPECT((parse("mistral", none).window == 4096 && parse("mistral", none).has_window(0)));
    EXPECT_USAGE_ERROR(parse("mistral", {{"sliding_window", 1}}), "sliding_window 1: must be at least 2");
    EXPECT_USAGE_ERROR(parse("qwen3", {{"use_sliding_window", true}, {"layer_types", {"sliding_attention"}}}),
                       "must have num_hidden_layers, 2, entries");
    EXPECT(hf_config(parse("mistral", none), DType::f32)["sliding_window"] == 4096);
    EXPECT(hf_config(parse("mistral", {{"sliding_window", nullptr}}), DType::f32)["sliding_window"].is_null());
    EXPECT(parse("mistral", {{"sliding_window", 64}, {"layer_types", {"full_attention"}}}).window ==
           64);  // not its key
    EXPECT_USAGE_ERROR(parse("qwen3", {{"attention_bias", true}}), "attention_bias true: a bias of o_proj");
    EXPECT_USAGE_ERROR(parse("qwen3", {{"partial_rotary_factor", 0.5}}), "partial_rotary_factor 0.5");
    EXPECT(parse("llama", {{"rope_parameters", {{"rope_type", "linear"}, {"factor", 2}, {"rope_theta", 7}}}})
               .rope_scaling->linear);
}

// What only the draw finds: a default of another family's, or a null that is not the default.
TEST_CASE("each optional key given, left out or null: the defaults of the family's class in transformers") {
    const auto families = nlohmann::json::parse(read_text(repository_file("tests/hf_defaults.json")));
    uint64_t number = 0;
    for (const auto& [family, of_family] : families.items())
        for (int draw = 0; draw < 100; ++draw) {
            nlohmann::json given = {{"model_type", family},    {"hidden_size", 64}, {"num_attention_heads", 32},
                                    {"intermediate_size", 24}, {"vocab_size", 20},  {"num_hidden_layers", 70}};
            given.update(of_family["needs"]);
            const nlohmann::json& defaults = of_family["defaults"];
            nlohmann::json all = given;
            all.update(defaults);
            for (const auto& [key, value] : defaults.items()) {
                const bool other_null =
                    key == "num_key_value_heads" || key == "sliding_window";  // means something else
                const uint64_t choice = random_bits(7, number++) % (other_null ? 2 : 3);
                if (choice > 0) given[key] = choice == 1 ? value : nullptr;
                if (key == "use_sliding_window" && draw % 2 == 1) given[key] = all[key] = true;
            }
            INFO(family << " " << given.dump());
            const auto read = [](const nlohmann::json& json) {  // through text: of a file numbers are unsigned
                return parse_hf_config(nlohmann::json::parse(json.dump()), "config.json");
            };
            LlamaConfig expected = read(all), found = read(given);
            EXPECT(found.window == expected.window);
            found.kept = expected.kept = "";
            EXPECT(hf_config(found, DType::f32) == hf_config(expected, DType::f32));
        }
}

TEST_CASE("a key that nothing reads: passed over if it says nothing or is irrelevant, else refused unless ignored") {
    nlohmann::json json = nlohmann::json::parse(hf_config(small_config(), DType::f32).dump());
    const LlamaConfig expected = parse_hf_config(json, "config.json");
    json.update({{"new", nullptr},
                 {"newer", false},
                 {"newest", 0},
                 {"empty", ""},
                 {"none", nlohmann::json::array()},
                 {"_private", 1},
                 {"use_cache", true},
                 {"id2label", {{"0", "a"}}},
                 {"eos_token_id", {1, 2}}});
    const LlamaConfig found = parse_hf_config(json, "config.json");
    EXPECT(hf_config(found, DType::f32)["eos_token_id"] == ordered_json({1, 2}));
    EXPECT(found.rope_theta == expected.rope_theta);
    json["attention_multiplier"] = 0.5;
    json["rope_parameters"] = {{"rope_type", "default"}, {"beta_fast", 32}};
    EXPECT_USAGE_ERROR(parse_hf_config(json, "config.json", {"attention_multiplier"}),
                       "beta_fast 32: is not supported");
    EXPECT_USAGE_ERROR(parse_hf_config(json, "config.json", {"rope_parameters.beta_fast"}),
                       "attention_multiplier 0.5: is not supported");
    (void)parse_hf_config(json, "config.json", {"attention_multiplier", "rope_parameters.beta_fast", "vocab_size"});
    json.erase("attention_multiplier");
    EXPECT_USAGE_ERROR(parse_hf_config(json, "config.json", {"attention_multiplier", "rope_parameters.beta_fast"}),
                       "--hf-ignore attention_multiplier: config.json has no such key");
    EXPECT(
        parse_hf_config(nlohmann::json::parse(hf_config(mixtral(), DType::f32).dump()), "").experts.balance.aux_loss ==
        mixtral().experts.balance.aux_loss);  // which --save-hf writes
}
