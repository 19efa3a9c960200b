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
#include "01_single_gpu/trainer.h"
#include "03_zero/zero.h"
#include "07_fp8/recipes.h"

namespace train70b {

// --fp8, --fp8-strict, --fp8-history, --fp8-margin; --optimizer adamw|adamw8bit
void add_fp8_flags(Flags& flags, Fp8Options& options, std::string& optimizer);
// Usage error where the two do not go with --dtype.
void check_precision(const Fp8Options& options, const std::string& optimizer, const std::string& dtype);
// With --fp8-strict: usage error if a layer would have to stay as it is. rows: of a micro-batch on a rank.
void check_fp8(const Fp8Options& options, const LlamaConfig& config, int64_t rows, int64_t tensor_ranks);
MakeOptimizer make_optimizer_of(const std::string& name, const AdamW::Hyper& hyper);
double moment_bytes(const std::string& optimizer,
                    DType dtype);  // per parameter: 8 (fp64: 16), or 2 and a share of scales

// What is left to do once the layers' slots are filled. A handle; the model outlives it.
class Fp8 {
  public:
    // Layers that stay in the model's dtype, and why: "down: 200 inputs do not divide by 16".
    const std::vector<std::string>& left_out() const { return left_out_; }
    int64_t layers() const { return int64_t(layers_.size()); }  // that do not

    void attach(Trainer& trainer) const;
    // ZeRO-3 gathers the weights of these layers as codes, a quarter or half of the bytes. Recipes with one scale per
    // tensor only; the others gather as before. Before the model is materialised.
    void gather_codes(Zero& zero) const;

    struct Layer {
        Linear* linear = nullptr;
        Operand input, weight, gradient;
        bool input_stays = false;  // someone else keeps x until this layer's backward pass: codes are made again
        Tensor gathered_scale;     // (1): of the weights where ZeRO gathers codes
    };

  private:
    std::vector<std::shared_ptr<Layer>> layers_;
    std::vector<std::string> left_out_;
    std::shared_ptr<Recipe> recipe_;
    Comm tensor_ranks_;
    friend Fp8 apply_fp8(Llama&, const Fp8Options&, int64_t, const Comm&);
};

// Fills Linear::multiply of the blocks' layers; after tensor parallelism has narrowed them. rows: of a micro-batch on a
// rank.
Fp8 apply_fp8(Llama& model, const Fp8Options& options, int64_t rows, const Comm& tensor_ranks = {});

}  // namespace train70b
