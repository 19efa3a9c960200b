#pragma once
// The shape of a Llama and the sums that follow from it: parameters, bytes, FLOPs.
#include <optional>
#include <string>
#include <vector>

#include "01_single_gpu/ops/ops.h"

namespace train70b {

// Llama-3.1's longer context: pairs that turn less than low_freq_factor times within the original context are slowed
// down by factor, those that turn more than high_freq_factor times stay, in between the two are blended.
struct RopeScaling {
    double factor = 8, low_freq_factor = 1, high_freq_factor = 4;
    int64_t original_context = 8192;  // tokens
};

struct LlamaConfig {
    std::string name = "tiny";
    int64_t layers = 4, hidden = 128, heads = 8, kv_heads = 4, ffn = 384, vocab = 256;
    double rope_theta = 10000;
    double norm_eps = 1e-5;
    std::optional<RopeScaling> rope_scaling;
    int64_t context = 0;  // tokens that a loaded model says it was made for; 0: nothing was said

    int64_t head_dim() const { return hidden / heads; }
    int64_t kv_width() const { return kv_heads * head_dim(); }  // of k, and of v
    // Whether n ranks can divide the heads: key/value heads are copied where there are fewer than ranks.
    bool heads_divide_by(int64_t n) const { return heads % n == 0 && (kv_heads % n == 0 || n % kv_heads == 0); }
    Rope rope() const;

    int64_t block_parameters() const;
    int64_t parameters() const;
};

// Known names: tiny 125m 1b 7b 8b 13b 30b 70b 175b 405b; usage error for another.
LlamaConfig preset(const std::string& name);
const std::vector<std::string>& preset_names();

// What the dimensions are called where they came from: by default, flags.
struct DimensionNames {
    std::string where;  // put before the message
    const char *layers = "--layers", *hidden = "--hidden", *heads = "--heads", *kv_heads = "--kv-heads", *ffn = "--ffn",
               *vocab = "--vocab";
};
// Usage error, naming the dimension, unless every one is possible.
void check_config(const LlamaConfig& config, const DimensionNames& names = {});

// Model FLOPs of one token, forward and backward: 6 per parameter without the input embedding (a multiply and an add,
// once forward and twice backward), plus causal attention 6*L*h*s (scores and values over s/2 keys on average).
// Recomputation is not counted: it is the price, not the product.
double flops_per_token(const LlamaConfig& config, int64_t seq_len);

// What a block's backward pass makes again: nothing; norms, RoPE and SwiGLU (pointwise); attention as well (selective);
// everything from the block's input (full). Each keeps less than the one before it.
enum class Recompute { none, pointwise, selective, full };
Recompute recompute_of(const std::string& name);
const std::vector<std::string>& recompute_names();

// How the layers are divided over ranks (chapter 04).
struct Division {
    int64_t tensor = 1;     // ranks that divide heads, ffn and vocabulary
    bool sequence = false;  // and the rows of norms and residuals
};
// Peak activation bytes of one micro-batch on one rank (derived in 01_single_gpu/README.md, held to the ledger within
// 2% by tests/01_memory.cpp). dtype: that of the activations.
struct ActivationFormula {
    int64_t block;    // what one block keeps for its backward pass
    int64_t fixed;    // batch indices and the residual stream's end
    int64_t working;  // the largest short-lived set on top of what is kept: head, MLP or attention
    int64_t total;    // layers * block + fixed + working
};
ActivationFormula activation_formula(const LlamaConfig& config, int64_t batch, int64_t seq_len, DType dtype,
                                     Recompute recompute, const Division& divided = {});

}  // namespace train70b
