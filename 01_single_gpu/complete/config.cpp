#include "01_single_gpu/complete/config.h"

#include <cmath>
#include <numbers>
#include <numeric>

#include "01_single_gpu/core/registry.h"

namespace train70b {

namespace {
// name, layers, hidden, heads, kv_heads, ffn, vocab, rope_theta, norm_eps; then rope_scaling, context (0: unknown),
// head_size (0: hidden / heads), qkv_bias, qk_norm, tied; then of experts: count, top_k, ffn
constexpr RopeScaling kLlama32 = {.factor = 32};
const std::vector<LlamaConfig> kPresets = {
    {"tiny", 4, 128, 8, 4, 384, 256, 1e4, 1e-5},             // bytes; learns in minutes on a laptop
    {"125m", 12, 768, 12, 12, 2048, 32000, 1e4, 1e-5},       // GPT-3 small's shape with SwiGLU
    {"1b", 22, 2048, 32, 4, 5632, 32000, 1e4, 1e-5},         // TinyLlama
    {"7b", 32, 4096, 32, 32, 11008, 32000, 1e4, 1e-5},       // Llama-2
    {"8b", 32, 4096, 32, 8, 14336, 128256, 5e5, 1e-5},       // Llama-3
    {"13b", 40, 5120, 40, 40, 13824, 32000, 1e4, 1e-5},      // Llama-2
    {"30b", 60, 6656, 52, 52, 17920, 32000, 1e4, 1e-6},      // LLaMA-1
    {"70b", 80, 8192, 64, 8, 28672, 128256, 5e5, 1e-5},      // Llama-3
    {"175b", 96, 12288, 96, 96, 32768, 50304, 1e4, 1e-5},    // GPT-3's shape with SwiGLU
    {"405b", 126, 16384, 128, 8, 53248, 128256, 5e5, 1e-5},  // Llama-3

    {"llama3.2-1b", 16, 2048, 32, 8, 8192, 128256, 5e5, 1e-5, kLlama32, 131072, 0, false, false, true},
    {"llama3.2-3b", 28, 3072, 24, 8, 8192, 128256, 5e5, 1e-5, kLlama32, 131072, 0, false, false, true},

    {"smollm2-135m", 30, 576, 9, 3, 1536, 49152, 1e5, 1e-5, {}, 8192, 0, false, false, true},
    {"smollm2-360m", 32, 960, 15, 5, 2560, 49152, 1e5, 1e-5, {}, 8192, 0, false, false, true},
    {"smollm2-1.7b", 24, 2048, 32, 32, 8192, 49152, 1.3e5, 1e-5, {}, 8192, 0, false, false, true},

    {"qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151936, 1e6, 1e-6, {}, 32768, 0, true, false, true},
    {"qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151936, 1e6, 1e-6, {}, 131072, 0, true, false, true},
    {"qwen2.5-3b", 36, 2048, 16, 2, 11008, 151936, 1e6, 1e-6, {}, 32768, 0, true, false, true},
    {"qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064, 1e6, 1e-6, {}, 131072, 0, true, false, false},

    {"qwen3-0.6b", 28, 1024, 16, 8, 3072, 151936, 1e6, 1e-6, {}, 40960, 128, false, true, true},
    {"qwen3-1.7b", 28, 2048, 16, 8, 6144, 151936, 1e6, 1e-6, {}, 40960, 0, false, true, true},
    {"qwen3-4b", 36, 2560, 32, 8, 9728, 151936, 1e6, 1e-6, {}, 40960, 128, false, true, true},
    {"qwen3-8b", 36, 4096, 32, 8, 12288, 151936, 1e6, 1e-6, {}, 40960, 0, false, true, false},
    {"qwen3-32b", 64, 5120, 64, 8, 25600, 151936, 1e6, 1e-6, {}, 40960, 128, false, true, false},

    {"mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, 1e6, 1e-5, {}, 32768, 0, false, false, false, {8, 2, 14336}},
    {"mixtral-8x22b", 56, 6144, 48, 8, 16384, 32000, 1e6, 1e-5, {}, 65536, 0, false, false, false, {8, 2, 16384}},
    {"qwen3-30b-a3b", 48, 2048, 32, 4, 6144, 151936, 1e6, 1e-6, {}, 40960, 128, false, true, false, {128, 8, 768}},
    {"qwen3-235b-a22b", 94, 4096, 64, 4, 12288, 151936, 1e6, 1e-6, {}, 40960, 128, false, true, false, {128, 8, 1536}},
};
}  // namespace

std::vector<std::string> preset_names() { return names_of(kPresets); }

LlamaConfig preset(const std::string& name) { return find_entry(kPresets, "--model", name); }

namespace {
constexpr double kMaxParameters = 1e15;  // more than any machine holds; their bytes still fit into 64 bits

// Usage error, naming the dimension that exceeds the largest preset's by the largest factor.
void check_size(const LlamaConfig& c, const DimensionNames& n) {
    // In double: products of these dimensions may overflow.
    const double E = double(c.hidden), D = c.head_size > 0 ? double(c.head_size) : E / double(c.heads);
    const double q = double(c.heads) * D, kv = double(c.kv_heads) * D;
    const double mlps = double(c.ffn) + double(c.experts.count + c.experts.shared) * double(c.experts.ffn);
    const double latents = double(c.latent.kv_rank) + double(c.latent.q_rank) + double(c.latent.rope_dim);
    const double block = 2 * E + 2 * q * E + 2 * kv * E + 3 * mlps * E + latents * (E + 4 * q);
    if (double(c.layers) * block + E + 2 * double(c.vocab) * E <= kMaxParameters) return;
    const LlamaConfig largest = preset("405b");
    std::pair<const char*, int64_t LlamaConfig::*> worst{};
    double excess = 0;
    for (const auto& d : {std::pair(n.layers, &LlamaConfig::layers),
                          {n.hidden, &LlamaConfig::hidden},
                          {n.heads, &LlamaConfig::heads},
                          {n.ffn, &LlamaConfig::ffn},
                          {n.vocab, &LlamaConfig::vocab}}) {
        if (d.second == &LlamaConfig::heads && c.head_size == 0) continue;  // they divide the hidden size
        if (const double ratio = double(c.*d.second) / double(largest.*d.second); ratio > excess)
            excess = ratio, worst = d;
    }
    const auto& [name, value] = worst;
    usage_error("{}{} {}: the model would have more than 1e15 parameters (--model {} has {} {})", n.where, name,
                c.*value, largest.name, name, largest.*value);
}

void check_latent(const LlamaConfig& c, const DimensionNames& n) {
    if (c.latent.rope_dim < 2 || c.latent.rope_dim % 2 != 0)
        usage_error("{}{} {}: must be even and at least 2, because RoPE rotates pairs", n.where, n.rope_dim,
                    c.latent.rope_dim);
    if (c.kv_heads != c.heads)
        usage_error("{}{} {}: with {} each of the {} heads has its own keys and values (try {} {})", n.where,
                    n.kv_heads, c.kv_heads, n.kv_rank, c.heads, n.kv_heads, c.heads);
    if (c.qkv_bias || c.qk_norm)
        usage_error("{}{} on: not supported with {} {} (try off)", n.where, c.qkv_bias ? "--qkv-bias" : "--qk-norm",
                    n.kv_rank, c.latent.kv_rank);
}

void check_experts(const LlamaConfig& c, const DimensionNames& n) {
    const ExpertsConfig& x = c.experts;
    if (x.count == 0) return;
    if (x.top_k > x.count) usage_error("{}{} {} must be at most {} {}", n.where, n.top_k, x.top_k, n.experts, x.count);
    if (x.dense_layers >= c.layers)
        usage_error("{}{} {} must be less than {} {}, or no layer has experts", n.where, n.dense_layers, x.dense_layers,
                    n.layers, c.layers);
    if (x.count % x.groups != 0)
        usage_error("{}{} {} is not divisible by {} {} (try {})", n.where, n.experts, x.count, n.groups, x.groups,
                    std::gcd(x.count, x.groups));
    if (x.top_groups > x.groups)
        usage_error("{}{} {} must be at most {} {}", n.where, n.top_groups, x.top_groups, n.groups, x.groups);
    if (const int64_t eligible = x.count / x.groups * x.top_groups; x.top_k > eligible)
        usage_error("{}{} {}: the best {} of {} groups have {} experts (try {} {})", n.where, n.top_k, x.top_k,
                    x.top_groups, x.groups, eligible, n.top_groups, (x.top_k * x.groups + x.count - 1) / x.count);
}
}  // namespace

void check_config(const LlamaConfig& c, const DimensionNames& n) {
    const std::pair<const char*, int64_t> dims[] = {{n.layers, c.layers},     {n.hidden, c.hidden}, {n.heads, c.heads},
                                                    {n.kv_heads, c.kv_heads}, {n.ffn, c.ffn},       {n.vocab, c.vocab}};
    for (const auto& [name, value] : dims)
        if (value < 1) usage_error("{}{} {}: must be an integer >= 1", n.where, name, value);
    check_size(c, n);
    if (c.head_size == 0 && c.hidden % c.heads != 0)
        usage_error("{}{} {} is not divisible by {} {} (try {} {})", n.where, n.hidden, c.hidden, n.heads, c.heads,
                    n.hidden, (c.hidden / c.heads + 1) * c.heads);
    if (c.heads % c.kv_heads != 0)
        usage_error("{}{} {} is not divisible by {} {} (try {} {})", n.where, n.heads, c.heads, n.kv_heads, c.kv_heads,
                    n.kv_heads, std::gcd(c.heads, c.kv_heads));
    const std::string head_dim =
        c.is_latent()
            ? fmt::format("{} {} + {} {} = {}", n.head_dim, c.value_dim(), n.rope_dim, c.latent.rope_dim, c.head_dim())
        : c.head_size > 0 ? fmt::format("{} {}", n.head_dim, c.head_size)
                          : fmt::format("{} {} / {} {} = {}", n.hidden, c.hidden, n.heads, c.heads, c.head_dim());
    if (c.is_latent())
        check_latent(c, n);
    else if (c.head_dim() % 2 != 0)
        usage_error("{}{}: the head size must be even, because RoPE rotates pairs", n.where, head_dim);
    if (c.head_dim() > kMaxHeadDim)
        usage_error("{}{}: the head size must be at most {}{}", n.where, head_dim, kMaxHeadDim,
                    c.head_size > 0 || c.is_latent() ? "" : fmt::format(" (try a larger {})", n.heads));
    if (c.qkv_bias && c.qk_norm)
        usage_error("{}--qkv-bias on: not supported with --qk-norm on, because no family of models has both", n.where);
    if (c.window == 1 || c.window < 0)
        usage_error("{}{} {}: must be at least 2 (a token and the one before it)", n.where, n.window, c.window);
    if (c.multi_token && c.tied) usage_error("{}--mtp on: not supported with --tied-embeddings on (try off)", n.where);
    check_experts(c, n);
}

void check_llama(const LlamaConfig& c) {
    const std::string flag = c.experts.count > 0 ? fmt::format("--experts {}", c.experts.count)
                             : c.is_latent()     ? fmt::format("--kv-lora-rank {}", c.latent.kv_rank)
                             : c.multi_token     ? "--mtp on"
                                                 : "";
    if (!flag.empty())
        usage_error(
            "{}: not supported by this program (try 01_single_gpu, 02_data_parallel, 03_zero, 05_pipeline or "
            "08_3d_full)",
            flag);
}

static double scaled(double inv_freq, const RopeScaling& s) {
    if (s.linear) return inv_freq / s.factor;
    const double turns = double(s.original_context) * inv_freq / (2 * std::numbers::pi);  // within the original context
    const double kept = std::clamp((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0.0, 1.0);
    return kept * inv_freq + (1 - kept) * inv_freq / s.factor;
}

Rope LlamaConfig::rope() const {
    Rope rope;
    rope.head_dim = static_cast<int>(is_latent() ? latent.rope_dim : head_dim());
    for (int i = 0; i < rope.head_dim / 2; ++i) {
        const double inv_freq = std::pow(rope_theta, -2.0 * i / rope.head_dim);
        rope.inv_freq[i] = rope_scaling ? scaled(inv_freq, *rope_scaling) : inv_freq;
    }
    return rope;
}

int64_t LlamaConfig::block_matrices(int64_t tp) const {
    int64_t qkv = (q_width(tp) + 2 * kv_width(tp)) * hidden;
    if (is_latent())
        qkv = (latent.q_rank + latent.kv_rank + latent.rope_dim) * hidden +
              q_width(tp) * (latent.q_rank > 0 ? latent.q_rank : hidden) + 2 * out_width() / tp * latent.kv_rank;
    return qkv + out_width() / tp * hidden  // o
           + 3 * ffn / tp * hidden;         // gate, up, down
}

int64_t LlamaConfig::block_vectors(int64_t tp) const {
    return 2 * hidden                                         // two norms
           + (qkv_bias ? q_width(tp) + 2 * kv_width(tp) : 0)  // biases of q, k, v
           + (qk_norm ? 2 * head_dim() : 0)                   // norms of q and k, shared by the heads
           + (sinks ? heads / tp : 0) + latent.q_rank + latent.kv_rank;
}

int64_t LlamaConfig::parameters_with(int64_t experts_of_layer) const {
    // What a sparse block has more than a dense one: the router, and other MLPs.
    const int64_t more = (experts.count + 3 * ((experts_of_layer + experts.shared) * experts.ffn - ffn)) * hidden;
    const int64_t module = multi_token ? block_parameters() + (2 * hidden + 3) * hidden + is_sparse() * more : 0;
    return layers * block_parameters() + sparse_layers() * more + hidden + (tied ? 1 : 2) * vocab * hidden + module;
}

double flops_per_token(const LlamaConfig& c, double attended) {
    const int64_t uses = 1 + c.multi_token;  // of the head
    const double active = double(c.active_parameters() + (uses - (c.tied ? 1 : 2)) * c.vocab * c.hidden);
    const int64_t blocks = c.layers + c.multi_token;
    return 6.0 * active + 3.0 * double(blocks * (c.q_width() + c.out_width())) * attended;  // scores, values
}

const std::vector<Named<Recompute>> kRecomputeLevels = {{"none", Recompute::none},
                                                        {"pointwise", Recompute::pointwise},
                                                        {"selective", Recompute::selective},
                                                        {"full", Recompute::full}};

std::vector<std::string> recompute_names() { return names_of(kRecomputeLevels); }

Recompute recompute_of(const std::string& name) { return find_entry(kRecomputeLevels, "--recompute", name).value; }

ActivationFormula activation_formula(const LlamaConfig& c, int64_t batch, int64_t seq_len, DType dtype,
                                     Recompute recompute, const Division& divided) {
    // Bytes per token. a: one element; s: one statistic (1/rms of two norms, lse of H heads). The rest are this rank's
    // widths. E: norms and residuals; q: queries and attention's output; kv: keys.
    const int64_t N = divided.tensor, a = size_of(dtype), s = size_of(stats_dtype(dtype));
    const int64_t kv = c.kv_width(N), q = c.q_width(N), F = c.ffn / N, V = (c.vocab + N - 1) / N, H = c.heads / N;
    const double S = divided.sequence ? double(N) : 1, E = double(c.hidden) / S, norm = double(s) / S;
    const double normed_heads = c.qk_norm ? a * (q + 2 * kv) : 0;  // q, k, v before the norms of q and k
    // Of the attention half: all of it; residuals and qkv.
    double attention_all = a * (4 * E + 2 * q + 2 * kv) + normed_heads + 2 * norm + s * H;
    double attention_products = a * (2 * E + q + 2 * kv) + 2 * norm, up_products = 0, normed_latents = 0;
    // The latents before and after their norms; q, k and v before RoPE.
    if (const Latent& x = c.latent; x.kv_rank > 0) {
        const double latents = double(x.q_rank + x.kv_rank), stats = double(s) * (x.q_rank > 0 ? 2 : 1);
        normed_latents = a * latents;
        attention_all += 2 * normed_latents + stats;
        up_products = a * double(q + 2 * c.out_width() / N);
        attention_products = a * (2 * E + latents + double(x.rope_dim)) + 2 * norm + stats;
    }
    const auto level_of = [&](int64_t layer) { return recompute_in(layer, recompute, divided.recompute_every); };
    // A block with an MLP of its width and, sparse, S slots per token with inputs, outputs and gate_up of experts, the
    // router's logits and weights, and three indices.
    struct BlockBytes {
        double everything, products, saved, mlp;  // mlp: the part of `saved` that the MLP or the experts save
    };
    const auto block_of = [&](int64_t layer) {
        const bool sparse = c.is_sparse(layer);
        const Recompute level = level_of(layer);
        const double width = double(sparse ? c.experts.shared * c.experts.ffn : F);
        const double S = sparse ? double(c.experts.top_k) : 0, Fe = double(c.experts.ffn);
        const double kept = sparse ? a * 2 * S * E + s * (double(c.experts.count) + S) + 12 * S : 0;
        BlockBytes bytes{attention_all + a * 3 * (width + S * Fe) + kept,
                         attention_products + a * 2 * (width + S * Fe) + kept, 0, a * 2 * (width + S * Fe) + kept};
        bytes.saved = level == Recompute::none        ? bytes.everything
                      : level == Recompute::pointwise ? bytes.products + up_products + a * q + s * H  // output, lse
                      : level == Recompute::selective ? bytes.products
                                                      : a * E + 12 * S;
        return bytes;
    };
    const int64_t last_layer = c.layers - (c.multi_token ? 0 : 1);
    const BlockBytes last = block_of(last_layer);
    const Recompute level = level_of(last_layer);  // in the turn of blocks before it less is kept
    double blocks = 0;
    for (int64_t layer = 0; layer < c.layers; ++layer) blocks += block_of(layer).saved;

    // Batch indices (3 x 4 bytes, with windows 4 x 4) and the end of the residual stream: the final norm's input, later
    // its gradient.
    double fixed = (c.hides_keys(seq_len) ? 4 : 3) * 4 + a * E;
    const double part = double(divided.loss_chunk) / double(batch * seq_len);
    const bool by_chunks = part > 0 && part < 1;
    if (c.multi_token) {  // its block and what is around it, two indices; the main logits, which wait for it
        fixed += 2 * 4 + a * (by_chunks ? E : double(V)) + a * 2 * E;
        if (level != Recompute::full) fixed += last.saved + a * 3 * E + 3 * norm;
    }
    // While the head runs: normed x, its gradient, logits (whose buffer now holds their gradient), 1/rms. By chunks:
    // the logits of some of the rows, and the gradient of these once more.
    const double head = a * (2 * E + (by_chunks ? part * double(V + c.hidden) : double(V))) + norm;
    // While the last block runs. MLP: dh and d gate_up (h itself was freed, or was never saved). Attention: what the
    // MLP saved has been freed; q, k, v are recomputed (selective: also out and lse); d out, dq, dk, dv are added.
    // Experts: d out while their outputs are still there; dh without them; dh and d gate_up without h.
    const bool again = level == Recompute::pointwise || level == Recompute::selective;
    double mlp = a * (again ? 3 : 2) * F, attention = 0;
    if (c.sparse_layers() > 0) {
        const double SE = double(c.experts.top_k) * E, SF = double(c.experts.top_k * c.experts.ffn);
        mlp = a * std::max({SE, (again ? 2 : 1) * SF, (again ? 3 : 2) * SF - SE});
    }
    if (again) {
        attention = a * (q + 2 * kv + 2 * q + 2 * kv) - a * E - last.mlp;
        if (level == Recompute::selective) attention += a * q + s * H + up_products + normed_latents;
    }
    if (level == Recompute::full)  // the full block without its input, which was saved; forward, then backward
        mlp = last.everything - a * E + std::max(mlp, 2.0 * a * E) + (c.multi_token ? a * 4 * E + 3 * norm : 0);
    const double working = std::max({head, mlp, attention}), tokens = double(batch * seq_len);
    const auto bytes = [tokens](double per_token) { return std::llround(per_token * tokens); };
    return {bytes(blocks / double(c.layers)), bytes(fixed), bytes(working), bytes(blocks + fixed + working)};
}

}  // namespace train70b
