// The ledger against the formulas: parameters, gradients and optimizer states exactly, peak activations within 2%.
#include <map>

#include "01_single_gpu/complete/run/training_run.h"
#include "tests/files.h"
#include "tests/support.h"

using namespace train70b;
using namespace train70b::test;

namespace {

struct Usage {
    MemoryBytes steady;
    MemoryPeak peak;
};

Usage train_two_steps(const LlamaConfig& config, const Llama::Options& options, int64_t sequences, int64_t seq_len) {
    const MemoryBytes before = ledger().now();
    Llama model(config, options);
    model.materialize(1);
    AdamW adamw(full_segments(model.params()), {});
    ledger().reset_peak();
    for (int step = 0; step < 2; ++step) {
        const int64_t rows = sequences * seq_len;
        std::vector<int32_t> ids(rows), positions(rows);
        for (int64_t i = 0; i < rows; ++i) ids[i] = int32_t(i % config.vocab), positions[i] = int32_t(i % seq_len);
        const auto up = [&](const std::vector<int32_t>& v) { return upload(v, {rows}, options.device); };
        Tape tape;
        Batch batch{sequences, seq_len, up(ids), up(ids), up(positions), 1.0 / double(rows)};
        if (config.multi_token) batch.next_tokens = up(ids), batch.next_targets = up(ids);
        model.forward(tape, batch);
        tape.backward();
        adamw.update(1, 1e-3, 1);
    }
    Usage usage{ledger().now(), ledger().peak()};
    for (int i = 0; i < kMemoryKinds; ++i) {
        usage.steady[i] -= before[i];
        usage.peak.kind[i] -= before[i];
    }
    return usage;
}

int64_t of(const MemoryBytes& bytes, Memory kind) { return bytes[int(kind)]; }

LlamaConfig shape(int64_t layers, int64_t hidden, int64_t heads, int64_t kv_heads, int64_t ffn, int64_t vocab) {
    LlamaConfig c;
    c.layers = layers, c.hidden = hidden, c.heads = heads, c.kv_heads = kv_heads, c.ffn = ffn, c.vocab = vocab;
    return c;
}

LlamaConfig with(LlamaConfig c, int64_t head_size, bool qkv_bias, bool qk_norm) {
    c.head_size = head_size, c.qkv_bias = qkv_bias, c.qk_norm = qk_norm;
    return c;
}

LlamaConfig with_experts(LlamaConfig config, const ExpertsConfig& experts) {
    config.experts = experts;
    return config;
}

LlamaConfig with_latents(LlamaConfig config, const Latent& latent) {
    config.kv_heads = config.heads, config.latent = latent;
    return config;
}

LlamaConfig with_further_token(LlamaConfig config) {
    config.multi_token = true;
    return config;
}

const std::vector<LlamaConfig> kShapes = {
    shape(4, 128, 8, 4, 384, 256),                       // the default
    shape(1, 64, 4, 4, 160, 2000),                       // the head dominates
    shape(3, 96, 6, 2, 64, 50),                          // attention dominates
    shape(2, 64, 2, 1, 1024, 100),                       // the MLP dominates
    with(shape(3, 96, 6, 2, 128, 50), 0, true, false),   // biases
    with(shape(3, 64, 6, 2, 128, 50), 32, false, true),  // norms of q and k; heads wider than the hidden size
    with(shape(3, 96, 4, 4, 192, 50), 8, false, false),  // narrower
    with_experts(shape(3, 64, 4, 4, 160, 50), {.count = 8, .top_k = 2, .ffn = 80}),
    with_experts(shape(4, 64, 4, 2, 160, 50), {.count = 6, .top_k = 3, .ffn = 24, .shared = 1, .dense_layers = 1}),
    with_latents(shape(3, 64, 4, 4, 160, 50), {.kv_rank = 24, .q_rank = 40, .rope_dim = 8}),
    with_latents(shape(2, 64, 4, 4, 640, 50), {.kv_rank = 16, .rope_dim = 4}),
    with_further_token(shape(3, 64, 4, 2, 160, 50)),
    with_further_token(shape(1, 64, 4, 4, 160, 2000)),
};

constexpr Recompute kLevels[] = {Recompute::none, Recompute::pointwise, Recompute::selective, Recompute::full};

}  // namespace

TEST_CASE("parameters, gradients and optimizer: exactly (2, 4 or 8) N, (2, 4 or 8) N, (8, 12 or 16) N bytes") {
    struct Bytes {
        DType dtype, grad;
        int64_t params, grads, optimizer;
    };
    for (const LlamaConfig& config : kShapes)
        for (const auto& [dtype, grad, params, grads, optimizer] : {Bytes{DType::f32, DType::f32, 4, 4, 8},
                                                                    {DType::bf16, DType::f32, 2, 4, 12},
                                                                    {DType::bf16, DType::bf16, 2, 2, 12},
                                                                    {DType::f64, DType::f64, 8, 8, 16}}) {
            const Usage usage = train_two_steps(config, {.dtype = dtype, .grad_dtype = grad}, 1, 8);
            const int64_t n = config.parameters();
            for (const MemoryBytes& bytes : {usage.steady, usage.peak.kind}) {
                EXPECT(of(bytes, Memory::params) == params * n);
                EXPECT(of(bytes, Memory::grads) == grads * n);
                EXPECT(of(bytes, Memory::optimizer) == optimizer * n);
            }
            EXPECT(of(usage.steady, Memory::activations) == 0);  // nothing outlives a step
            EXPECT(of(usage.steady, Memory::workspace) == 0);
        }
}

TEST_CASE("peak activations: within 2% of the formula at every recompute level, shape and dtype") {
    int64_t number = 0;
    for (const LlamaConfig& config : kShapes)
        for (DType dtype : {DType::f32, DType::bf16, DType::f64})
            for (Recompute level : kLevels) {
                const int64_t chunk = number % 2 * 20;  // rows of logits at a time, of 96
                const int64_t every = 1 + number / 4 % 3;
                if (!in_quarter(number++)) continue;
                const Usage usage = train_two_steps(config,
                                                    {.dtype = dtype,
                                                     .grad_dtype = stats_dtype(dtype),
                                                     .recompute = level,
                                                     .loss_chunk = chunk,
                                                     .recompute_every = every},
                                                    2, 48);
                const double expected = double(
                    activation_formula(config, 2, 48, dtype, level, {.loss_chunk = chunk, .recompute_every = every})
                        .total);
                const double got = double(of(usage.peak.kind, Memory::activations));
                INFO("layers " << config.layers << " ffn " << config.ffn << " level " << int(level) << " every "
                               << every << " dtype " << name_of(dtype) << ": " << got << " against " << expected);
                EXPECT(std::abs(got / expected - 1) <= 0.02);
            }
}

TEST_CASE("recomputation buys what it promises: full below selective below pointwise below none") {
    int64_t last = INT64_MAX;
    for (Recompute level : kLevels) {
        const int64_t now = of(train_two_steps(kShapes[0], {.recompute = level}, 2, 48).peak.kind, Memory::activations);
        EXPECT(now < last);
        last = now;
    }
}

TEST_CASE("the dry run books what the real one does: parameters, gradients, optimizer, activations") {
    for (Recompute level : kLevels) {
        const Usage real = train_two_steps(kShapes[0], {.dtype = DType::bf16, .recompute = level}, 2, 32);
        const Usage dry =
            train_two_steps(kShapes[0], {.dtype = DType::bf16, .device = Device::meta, .recompute = level}, 2, 32);
        for (Memory kind : {Memory::params, Memory::grads, Memory::optimizer, Memory::activations}) {
            EXPECT(of(dry.peak.kind, kind) == of(real.peak.kind, kind));
            EXPECT(of(dry.steady, kind) == of(real.steady, kind));
        }
    }
}

TEST_CASE("presets have the sizes their names promise") {
    const std::map<std::string, double> billions = {{"tiny", 0.00085}, {"125m", 0.134}, {"1b", 1.10},  {"7b", 6.74},
                                                    {"8b", 8.03},      {"13b", 13.0},   {"30b", 32.5}, {"70b", 70.6},
                                                    {"175b", 175.2},   {"405b", 405.9}};
    // Published counts, to the last parameter: of the files on Hugging Face, a tied matrix once.
    const std::map<std::string, int64_t> published = {{"llama3.2-1b", 1'235'814'400},
                                                      {"llama3.2-3b", 3'212'749'824},
                                                      {"smollm2-135m", 134'515'008},
                                                      {"smollm2-360m", 361'821'120},
                                                      {"smollm2-1.7b", 1'711'376'384},
                                                      {"qwen2.5-0.5b", 494'032'768},
                                                      {"qwen2.5-1.5b", 1'543'714'304},
                                                      {"qwen2.5-3b", 3'085'938'688},
                                                      {"qwen2.5-7b", 7'615'616'512},
                                                      {"qwen3-0.6b", 596'049'920},
                                                      {"qwen3-1.7b", 1'720'574'976},
                                                      {"qwen3-4b", 4'022'468'096},
                                                      {"qwen3-8b", 8'190'735'360},
                                                      {"qwen3-32b", 32'762'123'264},
                                                      {"8b", 8'030'261'248},
                                                      {"mixtral-8x7b", 46'702'792'704},
                                                      {"mixtral-8x22b", 140'620'634'112},
                                                      {"qwen3-30b-a3b", 30'532'122'624},
                                                      {"qwen3-235b-a22b", 235'093'634'560},
                                                      {"70b", 70'553'706'496},
                                                      {"7b", 6'738'415'616},
                                                      {"1b", 1'100'048'384}};
    for (const std::string& name : preset_names()) {
        const LlamaConfig config = preset(name);
        if (!config.tied) check_config(config);
        INFO(name << " has " << config.parameters());
        if (billions.contains(name))
            EXPECT(std::abs(double(config.parameters()) / 1e9 / billions.at(name) - 1) <= 0.01);
        else
            EXPECT(published.contains(name));
        if (published.contains(name)) EXPECT(config.parameters() == published.at(name));
    }
    EXPECT_USAGE_ERROR(preset("9b"), "70b");
}

TEST_CASE("the timeline: one line per booking, ending where the ledger stands") {
    ledger().start_timeline();
    ledger().phase("here");
    { Tensor a({10}, DType::f32, Device::cpu, Memory::comm); }
    const std::string csv = ledger().take_timeline();
    EXPECT(csv.starts_with("event,seconds,phase,params,grads,optimizer,activations,comm,workspace,total\n0,"));
    EXPECT(std::count(csv.begin(), csv.end(), '\n') == 3);
    const int64_t now = ledger().now()[int(Memory::comm)];
    const auto comm_of = [&](const std::string& line) {
        std::istringstream fields(line);
        std::string field;
        for (int i = 0; i < 8; ++i) std::getline(fields, field, ',');
        return std::stoll(field);
    };
    EXPECT(comm_of(csv.substr(csv.find("\n0,") + 1)) == now + 40);
    EXPECT(comm_of(csv.substr(csv.find("\n1,") + 1)) == now);
    { Tensor a({10}, DType::f32, Device::cpu, Memory::comm); }
    EXPECT(ledger().take_timeline().starts_with("2,"));  // only what has come since, numbered on
}

TEST_CASE("the limit of a control group is the least of its own and of those above it") {
    const Folder folder;
    std::filesystem::create_directories(folder / "a/b");
    std::filesystem::create_directories(folder / "memory/job");
    const auto limit = [&](const std::string& list) {
        write_text(folder / "list", list);
        return control_group_memory(folder / "list", folder.text());
    };
    EXPECT(limit("0::/a/b\n") == kInfinity);
    write_text(folder / "a/b/memory.max", "max\n");
    EXPECT(limit("0::/a/b\n") == kInfinity);
    write_text(folder / "a/memory.max", "4096\n");
    EXPECT(limit("0::/a/b\n") == 4096);
    write_text(folder / "a/b/memory.max", "1024\n");
    EXPECT(limit("0::/a/b\n") == 1024);
    EXPECT(limit("0::/a\n") == 4096);
    EXPECT(limit("0::/\n") == kInfinity);
    write_text(folder / "memory.max", "512\n");  // the root of a container's own name space
    EXPECT(limit("0::/\n") == 512);
    write_text(folder / "memory/job/memory.limit_in_bytes", "2048\n");
    EXPECT(limit("9:cpu:/job\n4:memory:/job\n") == 2048);
    EXPECT(limit("nonsense\n") == kInfinity);
}
