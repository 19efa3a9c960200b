#pragma once
// FP8 linear layers (Micikevicius et al. 2022): the three products of a layer in 8 bits, everything else in --dtype.
//
//     forward           Y  (R, out)  = X   (R, in)    W      X, W in E4M3
//     input gradient    dX (R, in)   = dY  (R, out)   W^T    dY in E5M2
//     weight gradient   dW (out, in) = dY^T (out, R)  X^T    sums in fp32, added to the gradient
//
// Each product is c = a b^T with the summed dimension innermost, as the tensor cores require: of X and W, of dY and
// W^T, of dY^T and X^T. What the backward pass keeps of X is X^T in 8 bits: half the bytes of bf16.
//
// In 8 bits: q, k, v; o; gate, up; down, of every block. Embedding, head, norms, attention and residuals keep their
// dtype; so do the weights that the optimizer updates: they are quantized for each product.
//
// in, out: features of the layer on this rank
#include <array>

#include "01_single_gpu/complete/llama.h"
#include "07_fp8/complete/recipes.h"

namespace train70b {

// The FP8 layers of a model. A handle; the model outlives it.
struct Fp8 {
    struct Layer {
        Linear* linear = nullptr;
        Operand input, weight, gradient;
        bool input_stays = false;   // another op keeps x until this layer's backward pass, which quantizes it again
        Tensor gathered_scale_inv;  // (1): of the weights where ZeRO gathers FP8 data
    };
    std::vector<std::shared_ptr<Layer>> layers;
    // Layers that stay in the model's dtype, and why: "down: 200 inputs are not divisible by 16".
    std::vector<std::string> left_out;
    std::shared_ptr<Recipe> recipe;  // also a step state of the trainer; null: --fp8 off
    Comm tensor_ranks;
};

// Sets Linear::multiply of the blocks' layers; call it after tensor parallelism has narrowed them. rows: of a
// micro-batch on a rank. data_rank: of the batch's parts, which round at random by other numbers.
Fp8 apply_fp8(Llama& model, const Fp8Options& options, int64_t rows, const Comm& tensor_ranks = {},
              int64_t data_rank = 0);

// The linear layers of a block, and why one of this shape cannot be in 8 bits (empty: it can).
struct LayerShape {
    const char* name;
    int64_t in, out;  // on a rank
    const char *in_flags, *out_flags;
};
std::array<LayerShape, 4> layer_shapes(const LlamaConfig& config, int64_t tensor_ranks);
std::string why_not_fp8(const LayerShape& layer, int64_t rows, int64_t divisor);

}  // namespace train70b
