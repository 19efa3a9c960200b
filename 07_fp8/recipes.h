#pragma once
// Where the scales come from: all that the recipes differ in.
//
//     current     one scale per tensor, from its amax now: reads the tensor twice
//     delayed     one scale per tensor, from the amaxes of earlier steps: one pass; what is larger than ever saturates
//     rowwise     one per row, from its amax now: a token with large values does not cost the others their precision
//     blockwise   one per 1 x 128 of activations and gradients, one per 128 x 128 of weights, from the amax now
//                 (DeepSeek-V3, section 3.3); so local that gradients do not need E5M2's range, and all is E4M3
//
// A product sums over the columns of its two operands, and scales may not change along the sum but every 128 terms. So
// row-wise and block-wise scales of a tensor and of its transpose are different ones: both are quantised from the
// tensor.
#include <deque>
#include <memory>

#include "01_single_gpu/roles.h"
#include "02_data_parallel/comm.h"
#include "07_fp8/quantize.h"

namespace train70b {

struct Fp8Options {
    std::string recipe = "current";  // off, current, delayed, rowwise, blockwise
    bool strict = false;             // a layer that cannot be in 8 bits is a usage error
    int64_t history = 1024;          // delayed: steps whose amax counts
    int64_t margin = 0;              // delayed: the scale leaves room for amaxes 2^margin times as large
};

// One operand of one layer's products. Under tensor parallelism a rank has a part of it; the amax is that of the whole.
struct Operand {
    enum Role { input, weight, gradient } role = input;
    int64_t number = 0;  // among all operands of this rank's model, three per layer in the order of the roles
    bool rows_divided = false, cols_divided = false;  // over the tensor-parallel ranks
};

// x (rows, cols) for a product over its columns, and x^T for one over its rows.
struct Codes {
    Quantized plain, transposed;
};
enum class Want { plain, transposed, both };

class Recipe : public StepState {
  public:
    // In 8 bits what is wanted of x; the transpose's codes are booked as `kind`. training: false where the values are
    // not news for the recipe's statistics (evaluation, the same tensor again).
    virtual Codes quantize(const Operand& operand, const Tensor& x, Want want, bool training,
                           Memory kind = Memory::workspace) = 0;
    void next_step() override {}  // collective over the tensor-parallel ranks
    virtual DType format(Operand::Role role) const { return role == Operand::gradient ? DType::e5m2 : DType::e4m3; }
    virtual Scaling scaling(Operand::Role) const { return Scaling::tensor; }
    virtual int64_t divisor() const { return 16; }  // of all dimensions of a product
};
// operands: how many there will be. tensor_ranks: over which layers are divided.
std::unique_ptr<Recipe> make_recipe(const Fp8Options& options, int64_t operands, Device device,
                                    const Comm& tensor_ranks);

// Scales from x's own amax.
class JustInTime : public Recipe {
  public:
    explicit JustInTime(const Comm& tensor_ranks) : ranks_(tensor_ranks) {}
    Codes quantize(const Operand& operand, const Tensor& x, Want want, bool training, Memory kind) override;

  private:
    const Comm ranks_;
};

class Rowwise : public JustInTime {
  public:
    using JustInTime::JustInTime;
    Scaling scaling(Operand::Role) const override { return Scaling::row; }
};

class Blockwise : public JustInTime {
  public:
    using JustInTime::JustInTime;
    DType format(Operand::Role) const override { return DType::e4m3; }
    Scaling scaling(Operand::Role role) const override {
        return role == Operand::weight ? Scaling::block128 : Scaling::vec128;
    }
    int64_t divisor() const override { return 128; }
};

// Scales from the largest amax of the last `history` steps. An operand that has none yet is scaled by its own.
class Delayed : public JustInTime {
  public:
    Delayed(const Fp8Options& options, int64_t operands, Device device, const Comm& tensor_ranks);
    Codes quantize(const Operand& operand, const Tensor& x, Want want, bool training, Memory kind) override;
    void next_step() override;
    float scale(int64_t operand) const { return states_[size_t(operand)].scale; }  // 0: none yet

  private:
    struct State {
        std::deque<float> amaxes;  // of the last steps, the newest last
        float scale = 0;
    };
    Tensor place(int64_t operand) const;  // of its scale

    const Fp8Options options_;
    const Comm ranks_;
    std::vector<State> states_;
    Tensor amax_, scale_;  // of this step so far, and in use; (operands) and (operands, 4): cuBLASLt wants 16 bytes
};

}  // namespace train70b
