#pragma once
// The shape of a Llama, and what follows from it: parameter count, activation bytes, FLOPs.
#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "01_single_gpu/ops/ops.h"
#include "01_single_gpu/ops/routing.h"

namespace train70b {

// Long-context RoPE. Llama-3.1's: pairs that rotate fewer than low_freq_factor times within the original context are
// slowed down by `factor`, pairs that rotate more than high_freq_factor times are unchanged, and those in between are
// interpolated. Linear (Chen et al. 2023): all pairs are slowed down, which divides every position by `factor`.
struct RopeScaling {
    double factor = 8, low_freq_factor = 1, high_freq_factor = 4;
    int64_t original_context = 8192;  // tokens
    bool linear = false;              // only `factor` is used
    bool operator==(const RopeScaling&) const = default;
};

// How the load of experts is kept even. Sums are over the N experts and the sparse layers.
struct Balance {
    // aux_loss * mean over the sequences of  sum_i f_i P_i:  f_i = N / (k T) * (slots of the sequence that chose i),
    // P_i the mean score. of_batch: f_i of the whole batch of the step before (of the first step: 1), the same in all
    // layouts, too.
    double aux_loss = 0.01;
    bool of_batch = false;
    double z_loss = 0;     // * mean over the tokens of log(sum of exp(logits))^2
    double bias_rate = 0;  // after a step, bias_i += bias_rate * sign(mean load - load of i) (DeepSeek-V3)
};

// Experts instead of the MLP (experts/experts.h).
struct ExpertsConfig {
    int64_t count = 0;         // N; 0: none, a dense model
    int64_t top_k = 2;         // k, of each token
    int64_t ffn = 0;           // F of one expert
    int64_t shared = 0;        // experts that every token passes: one MLP of shared * ffn
    int64_t dense_layers = 0;  // the first layers have the dense MLP
    bool sigmoid = false;      // scores: a sigmoid of each logit, instead of a softmax
    bool normalize = true;     // the weights of a token sum to `scale`
    double scale = 1;
    int64_t groups = 1, top_groups = 1;  // experts are chosen from the best groups
    double capacity_factor = 0;          // slots per sequence and expert: ceil(factor T k / N); 0: no limit
    Balance balance;

    RouterShape router() const { return {count, top_k, sigmoid, normalize, scale, groups, top_groups}; }
};

// Multi-head latent attention (latent_attention.h): C, Q and P.
struct Latent {
    int64_t kv_rank = 0;   // 0: none
    int64_t q_rank = 0;    // 0: queries are made of x
    int64_t rope_dim = 0;  // numbers of q and k that RoPE rotates, beside as many others as v has
    bool operator==(const Latent&) const = default;
};

struct LlamaConfig {
    std::string name = "tiny";
    int64_t layers = 4, hidden = 128, heads = 8, kv_heads = 4, ffn = 384, vocab = 256;
    double rope_theta = 10000;
    double norm_eps = 1e-5;
    std::optional<RopeScaling> rope_scaling;
    int64_t context = 0;  // max_position_embeddings of a loaded model, tokens; 0: unknown
    // What distinguishes the families of dense models (a table in README.md).
    int64_t head_size = 0;  // D; 0: hidden / heads
    bool qkv_bias = false;  // q_proj, k_proj and v_proj have biases (Qwen2)
    bool qk_norm = false;   // each head of q and k passes an RMSNorm before RoPE (Qwen3)
    bool tied = false;      // one matrix is both the embedding and the head: there is no lm_head.weight
    ExpertsConfig experts;
    // Sliding windows (Mistral): a query of such a layer sees itself and the window - 1 tokens before it.
    int64_t window = 0;          // 0: every layer sees all
    std::vector<bool> windowed;  // by layer; empty: all are
    bool sinks = false;          // gpt-oss: a learned logit of each head in its softmax (ops/sinks.h)
    Latent latent;
    bool multi_token = false;  // one more block predicts the token after the next (multi_token.h)
    // Of a loaded model: what --save-hf writes again.
    std::string family;  // model_type; empty: the first that fits
    std::string kept;    // other keys of its config.json, as a JSON object

    bool is_latent() const { return latent.kv_rank > 0; }
    int64_t value_dim() const { return head_size > 0 ? head_size : hidden / heads; }
    int64_t head_dim() const { return value_dim() + latent.rope_dim; }
    int64_t out_width() const { return heads * value_dim(); }   // columns of o_proj
    int64_t q_width() const { return heads * head_dim(); }      // H*D: columns of q, and of attention's output
    int64_t kv_width() const { return kv_heads * head_dim(); }  // K*D: columns of k, and of v
    // Those of each of tp tensor-parallel ranks, which hold at least one key/value head.
    int64_t q_width(int64_t tp) const { return q_width() / tp; }
    int64_t kv_width(int64_t tp) const { return std::max<int64_t>(kv_heads / tp, 1) * head_dim(); }
    // Whether the heads can be divided over n ranks; key/value heads are replicated if there are fewer than ranks.
    bool heads_divide_by(int64_t n) const { return heads % n == 0 && (kv_heads % n == 0 || n % kv_heads == 0); }
    Rope rope() const;

    // Whether first and last stage of a pipeline have the embedding's matrix.
    bool embeds_twice() const { return tied || multi_token; }
    bool has_window(int64_t layer) const {  // multi_token's block: with a pattern none
        return window > 0 && (windowed.empty() || (layer < layers && windowed[size_t(layer)]));
    }
    int64_t window_of(int64_t layer) const { return has_window(layer) ? window : 0; }
    bool hides_keys(int64_t seq_len) const { return window > 0 && window < seq_len; }
    double window_share() const {  // of the layers
        int64_t count = 0;
        for (int64_t layer = 0; layer < layers; ++layer) count += has_window(layer);
        return double(count) / double(layers);
    }
    // Twice the keys that a token sees, in the mean of the layers and of a sequence's tokens; without windows seq_len.
    double attended(double seq_len) const {
        const double W = std::min(double(window), seq_len);
        return seq_len - window_share() * (seq_len - W * (2 - W / seq_len));
    }

    bool is_sparse() const { return experts.count > 0; }  // some layers have experts
    bool is_sparse(int64_t layer) const { return experts.count > 0 && layer >= experts.dense_layers; }
    int64_t sparse_layers() const {
        return experts.count > 0 ? std::max<int64_t>(layers - experts.dense_layers, 0) : 0;
    }
    // Columns of a layer's MLP: of the shared experts in a sparse layer.
    int64_t mlp_width(int64_t layer) const { return is_sparse(layer) ? experts.shared * experts.ffn : ffn; }

    // Elements of a dense block on each of tp tensor-parallel ranks: of its seven weight matrices; of norms and biases.
    int64_t block_matrices(int64_t tp = 1) const;
    int64_t block_vectors(int64_t tp = 1) const;
    int64_t block_parameters(int64_t tp = 1) const { return block_matrices(tp) + block_vectors(tp); }
    int64_t parameters() const { return parameters_with(experts.count); }
    int64_t active_parameters() const { return parameters_with(experts.top_k); }  // those that a token passes

  private:
    int64_t parameters_with(int64_t experts_of_layer) const;
};

// One of preset_names(): tiny, 125m, 1b ... 405b, llama3.2-1b, qwen3-8b ...; usage error for any other name.
LlamaConfig preset(const std::string& name);
constexpr int64_t kMaxLayers = 10'000, kMaxExperts = 100'000;  // of a config.json
std::vector<std::string> preset_names();

// The names of the dimensions in error messages: flags by default, keys for a config.json.
struct DimensionNames {
    std::string where;  // prefix of the message
    const char *layers = "--layers", *hidden = "--hidden", *heads = "--heads", *kv_heads = "--kv-heads", *ffn = "--ffn",
               *vocab = "--vocab", *head_dim = "--head-dim", *window = "--window", *kv_rank = "--kv-lora-rank",
               *rope_dim = "--qk-rope-head-dim", *experts = "--experts", *top_k = "--top-k",
               *dense_layers = "--dense-layers", *groups = "--expert-groups", *top_groups = "--top-groups";
};
// Usage error, naming the dimension, if a dimension is invalid.
void check_config(const LlamaConfig& config, const DimensionNames& names = {});

// Usage error for experts, latent attention and multi-token prediction: of the programs that do not divide them.
void check_llama(const LlamaConfig& config);

// The part of the model that a rank holds: the layers of its pipeline stage (chapter 05).
struct Chunk {
    int64_t first_layer = 0, end_layer = 0;  // blocks [first, end)
};
struct Stage {
    std::vector<Chunk> chunks;           // ascending; more than one under virtual stages
    bool embedding = true, head = true;  // runs the embedding, the head
};

inline Stage full_model(const LlamaConfig& config) { return {{{0, config.layers}}, true, true}; }

// Model FLOPs per token, forward and backward: 6 per parameter without the input embedding (a multiply and an add, once
// forward and twice backward), plus 6*L*H*D*T for causal attention (scores and values over T/2 keys on average).
// Recomputation is not counted. A tied matrix counts once, for the head's product. attended: twice the keys that a
// token sees in the mean, config.attended(T); with documents there are fewer.
double flops_per_token(const LlamaConfig& config, double attended);

// A flag's value beside what is usual, where a run fails for one that is far from it.
struct UsualValue {
    const char* flag;
    double value, usual;
};
std::vector<UsualValue> usual_values_of_other_part(const LlamaConfig& config);  // not of the dense model's flags

// What a block recomputes in its backward pass: nothing; norms, RoPE and SwiGLU (pointwise); attention as well
// (selective); the full block from its input (full). Each level stores fewer activations than the one before it.
enum class Recompute { none, pointwise, selective, full };
Recompute recompute_of(const std::string& name);  // usage error for an unknown name
std::vector<std::string> recompute_names();
// --recompute-every N: blocks 0, N, 2 N ... of the whole model; the others keep everything.
inline Recompute recompute_in(int64_t layer, Recompute level, int64_t every) {
    return layer % every == 0 ? level : Recompute::none;
}

// How tensor parallelism (chapter 04) divides the layers.
struct Division {
    int64_t tensor = 1;     // ranks over which heads, ffn and vocabulary are divided
    bool sequence = false;  // sequence parallelism: the rows of norms and residuals are divided as well
    int64_t loss_chunk = 0;
    int64_t recompute_every = 1;
};
// Peak activation bytes of one micro-batch on one rank (derived in 01_single_gpu/README.md; tests/01_memory.cpp checks
// that the ledger agrees within 2%). dtype: of the activations.
struct ActivationFormula {
    int64_t block;    // saved by one block for its backward pass, mean of the blocks; experts: without a capacity
    int64_t fixed;    // batch indices and the end of the residual stream
    int64_t working;  // the largest temporary set on top of what is saved: head, MLP or attention
    int64_t total;    // layers * block + fixed + working
};
ActivationFormula activation_formula(const LlamaConfig& config, int64_t batch, int64_t seq_len, DType dtype,
                                     Recompute recompute, const Division& divided = {});

}  // namespace train70b
