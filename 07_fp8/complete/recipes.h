#pragma once
// FP8 recipes: where the scales come from.
//
//     current     one scale per tensor, from its current amax: reads the tensor twice
//     delayed     one scale per tensor, from the amaxes of earlier steps: one pass; values above all of them saturate
//     rowwise     one per row, from its current amax: a token with large values does not reduce the precision of others
//     blockwise   one per 1 x 128 of activations and gradients, one per 128 x 128 of weights, from the current amax
//                 (DeepSeek-V3, section 3.3); so local that gradients do not need E5M2's range, and all data is E4M3
//     mxfp8       a power of two, rounded up, per 1 x 32; all data is E4M3 (OCP Microscaling; Mishra et al. 2025)
//     nvfp4       E2M1 data: an E4M3 scale per 1 x 16, of weights per 16 x 16, and one of the tensor; gradients are
//                 rounded at random, both operands of dW transformed by hadamard16 (NVIDIA 2025, arXiv 2509.25149)
//     int8        as rowwise, of integers
//
// A product sums over the columns of its two operands, and scales may change along the sum only every 128 terms. So a
// tensor and its transpose have different row-wise and block-wise scales, and both are quantized from the tensor.
#include <deque>
#include <map>
#include <memory>

#include "01_single_gpu/complete/roles.h"
#include "02_data_parallel/comm.h"
#include "07_fp8/complete/quantize.h"

namespace train70b {

struct Fp8Options {
    std::string recipe = "current";  // off, or one of fp8_recipes()
    bool strict = false;             // a layer that cannot be in 8 bits is a usage error
    int64_t history = 1024;          // delayed: length of the amax history, in steps
    int64_t margin = 0;              // delayed: the scale leaves room for amaxes 2^margin times as large
};

// One operand of one layer's products. Under tensor parallelism a rank holds a shard of it; the amax is that of the
// full tensor.
struct Operand {
    enum Role { input, weight, gradient } role = input;
    int64_t index = 0;  // among all operands of this rank's model, three per layer in the order of the roles
    bool rows_sharded = false, cols_sharded = false;  // over the tensor-parallel ranks
    Tensor amax, amax_t;        // over all ranks, of x and x^T, where Recipe::weights_changed() has exchanged them
    uint64_t key = 0;           // of a gradient's random numbers: of the layer and the data-parallel rank
    std::vector<int64_t> outs;  // of a gradient's columns: their indices in the full tensor; empty: 0, 1, 2 ...
};
struct WeightOperand {
    Operand* operand;
    Tensor weight;  // (out, in), a view
};

// x (rows, cols) quantized for a product over its columns (rowwise), and x^T for a product over x's rows (columnwise),
// as Transformer Engine names the two.
struct QuantizedPair {
    Quantized rowwise, columnwise;
};
enum class Usage { rowwise, columnwise, both };

class Recipe : public StepState {
  public:
    // By index, the same in every layout: "model.layers.0.mlp.down_proj.weight input".
    std::vector<std::string> operand_names;

    // Quantizes x; the columnwise data is booked as `kind`. training: false where the values must not enter the amax
    // history (evaluation, the same tensor again).
    virtual QuantizedPair quantize(const Operand& operand, const Tensor& x, Usage usage, bool training,
                                   Memory kind = Memory::workspace) = 0;
    void next_step() override {}  // collective over the tensor-parallel ranks
    // The weights of all layers have changed; they stay as they are until the next call. Collective over the
    // tensor-parallel ranks.
    virtual void weights_changed(const std::vector<WeightOperand>&) {}
    virtual DType format(Operand::Role role) const { return role == Operand::gradient ? DType::e5m2 : DType::e4m3; }
    virtual Scaling scaling(Operand::Role) const { return Scaling::tensor; }
    virtual int64_t divisor() const { return 16; }  // all dimensions of a product must be divisible by it
};

// One value of --fp8 besides off. To add a recipe, write its class and add it to the list in recipes.cpp: the flag, the
// checks, the tests and the tables iterate over that list.
struct Fp8Recipe {
    std::string name, description;
    // operands: of the model, on this rank. tensor_ranks: over which layers are sharded.
    std::unique_ptr<Recipe> (*make)(const Fp8Options& options, int64_t operands, Device device,
                                    const Comm& tensor_ranks);
    bool on_gpu = true;
};
// Usage error for a recipe that GPUs do not have here; device: "--device cuda".
void check_on_gpu(const Fp8Options& options, const std::string& device);
const std::vector<Fp8Recipe>& fp8_recipes();
std::vector<std::string> fp8_values();  // of --fp8: off, and the names of all recipes
std::unique_ptr<Recipe> make_recipe(const Fp8Options& options, int64_t operands, Device device,
                                    const Comm& tensor_ranks);  // usage error for an unknown name

// Scales from x's own amax. Weights keep theirs for a whole step, so the ranks exchange the amaxes of all weights once,
// in one message; inputs and gradients are new in each product, which has to wait for their amax.
class CurrentScaling : public Recipe {
  public:
    explicit CurrentScaling(const Comm& tensor_ranks) : ranks_(tensor_ranks) {}
    QuantizedPair quantize(const Operand& operand, const Tensor& x, Usage usage, bool training, Memory kind) override;
    void weights_changed(const std::vector<WeightOperand>& weights) override;

  protected:
    QuantizedPair allocate(const Operand& operand, const Tensor& x, Usage usage, Memory kind) const;
    virtual Scaling exchanged() const { return scaling(Operand::weight); }  // the weights' amaxes
    const Comm ranks_;

  private:
    Tensor weight_amaxes_;  // the message: all Operand::amax and amax_t
};

class RowwiseScaling : public CurrentScaling {
  public:
    using CurrentScaling::CurrentScaling;
    Scaling scaling(Operand::Role) const override { return Scaling::row; }
};

class BlockwiseScaling : public CurrentScaling {  // scales.cpp
  public:
    using CurrentScaling::CurrentScaling;
    DType format(Operand::Role role) const override;
    Scaling scaling(Operand::Role role) const override;
    int64_t divisor() const override { return 128; }
};

class Mxfp8Scaling : public CurrentScaling {  // microscaling.cpp
  public:
    using CurrentScaling::CurrentScaling;
    QuantizedPair quantize(const Operand& operand, const Tensor& x, Usage usage, bool training, Memory kind) override;
    DType format(Operand::Role) const override { return DType::e4m3; }
    Scaling scaling(Operand::Role) const override { return Scaling::vec32; }
    int64_t divisor() const override { return 32; }
};

class Nvfp4Scaling : public CurrentScaling {  // microscaling.cpp
  public:
    using CurrentScaling::CurrentScaling;
    QuantizedPair quantize(const Operand& operand, const Tensor& x, Usage usage, bool training, Memory kind) override;
    void begin_step(int64_t step) override;
    DType format(Operand::Role) const override { return DType::e2m1; }
    Scaling scaling(Operand::Role role) const override {
        return role == Operand::weight ? Scaling::block16 : Scaling::vec16;
    }

  private:
    Scaling exchanged() const override { return Scaling::tensor; }
    int64_t step_ = 0;
    std::map<int64_t, uint64_t> passes_;  // by operand: backward passes in this step
};

class Int8Scaling : public RowwiseScaling {
  public:
    using RowwiseScaling::RowwiseScaling;
    DType format(Operand::Role) const override { return DType::i8; }
};

// Scales from the largest amax of the last `history` steps. An operand without a history is scaled by its current amax.
class DelayedScaling : public CurrentScaling {
  public:
    DelayedScaling(const Fp8Options& options, int64_t operands, Device device, const Comm& tensor_ranks);
    QuantizedPair quantize(const Operand& operand, const Tensor& x, Usage usage, bool training, Memory kind) override;
    void next_step() override;
    void weights_changed(const std::vector<WeightOperand>&) override {}  // its scales do not depend on them
    Rows rows() const override;  // scale_inv, the amax of this step, and the history
    void restore(const Rows& rows) override;
    float scale_inv(int64_t operand) const { return states_[size_t(operand)].scale_inv; }  // 0: none yet

  private:
    struct State {
        std::deque<float> amax_history;  // of the last `history` steps, the newest last; 0 before the first
        float scale_inv = 0;
    };
    void upload_scales();

    const Fp8Options options_;
    std::vector<State> states_;
    Tensor amax_;       // (operands): of this step so far
    Tensor scale_inv_;  // (operands, 4): in use; 16 bytes each, the alignment that cuBLASLt requires
};

}  // namespace train70b
