#pragma once
// FP8 linear layers (Micikevicius et al. 2022): the three products of a layer in 8 bits, everything else as it was.
//
//     forward           Y  (R, out)  = X   (R, in)    W      X, W in E4M3
//     input gradient    dX (R, in)   = dY  (R, out)   W^T    dY in E5M2
//     weight gradient   dW (out, in) = dY^T (out, R)  X^T    sums in fp32, added to the gradient
//
// Written as c = a b^T, all operands with the summed dimension innermost: X and W as they lie, then dY and W^T, then
// dY^T and X^T. What the backward pass keeps of X is X^T in 8 bits: half the bytes of bf16.
//
// In 8 bits: q, k, v; o; gate, up; down, of every block. Embedding, head, norms, attention, residuals keep their dtype;
// so do the weights that the optimizer changes, of which each product makes codes anew.
//
// R rows of x; in, out: of the layer, on this rank
#include <array>

#include "01_single_gpu/llama.h"
#include "07_fp8/recipes.h"

namespace train70b {

// The FP8 layers of a model. A handle; the model outlives it.
class Fp8 {
  public:
    struct Layer {
        Linear* linear = nullptr;
        Operand input, weight, gradient;
        bool input_stays = false;  // someone else keeps x until this layer's backward pass: it is quantized again then
        Tensor gathered_scale;     // (1): of the weights where ZeRO gathers FP8 data
    };
    const std::vector<std::shared_ptr<Layer>>& layers() const { return layers_; }
    // Layers that stay in the model's dtype, and why: "down: 200 inputs are not divisible by 16".
    const std::vector<std::string>& left_out() const { return left_out_; }
    Recipe& recipe() const { return *recipe_; }              // where there are layers
    StepState* step_state() const { return recipe_.get(); }  // null: --fp8 off
    const Comm& tensor_ranks() const { return tensor_ranks_; }

  private:
    std::vector<std::shared_ptr<Layer>> layers_;
    std::vector<std::string> left_out_;
    std::shared_ptr<Recipe> recipe_;
    Comm tensor_ranks_;
    friend Fp8 apply_fp8(Llama&, const Fp8Options&, int64_t, const Comm&);
};

// Sets Linear::multiply of the blocks' layers; after tensor parallelism has narrowed them. rows: of a micro-batch on a
// rank.
Fp8 apply_fp8(Llama& model, const Fp8Options& options, int64_t rows, const Comm& tensor_ranks = {});

// Why a layer of this shape cannot be in 8 bits; empty: it can.
struct LayerShape {
    const char* name;
    int64_t in, out;  // on a rank
    const char *in_flags, *out_flags;
};
std::array<LayerShape, 4> layer_shapes(const LlamaConfig& config, int64_t tensor_ranks);
std::string why_not_fp8(const LayerShape& layer, int64_t rows, int64_t divisor);

}  // namespace train70b
