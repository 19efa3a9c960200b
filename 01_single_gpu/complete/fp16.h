#pragma once
// --dtype fp16: mixed precision (Micikevicius et al. 2018), with torch.autocast's rounding in linear layers and
// GradScaler's loss scale. The operands of these layers' products are rounded to fp16, and so are their results and the
// gradients of their inputs; sums, weights' gradients and everything else are fp32. An fp16 has 11 significant bits,
// where bf16 has 8, but its values end at 65504 and at 2^-24, its smallest subnormal. Gradients, most of them small,
// would become 0, so the loss is multiplied by a scale. On the CPU, where products of such operands are products of
// fp32.
#include "01_single_gpu/complete/roles.h"

namespace train70b {

// Sets Linear::multiply of the blocks' layers and of the head.
void use_fp16_products(Llama& model);

// Dynamic loss scaling: halves the scale, and leaves out the update, where a gradient is not finite; doubles it after
// so many steps in which all were. The defaults are those of torch.amp.GradScaler. All ranks have the same norm, and
// decide alike. A loss that is not finite ends the run: no scale repairs the forward pass.
class LossScale : public StepState {
  public:
    static constexpr double kFirst = 1 << 16;
    static constexpr int64_t kGrowEvery = 2000;
    explicit LossScale(double fixed) : dynamic_(fixed == 0), scale_(fixed > 0 ? fixed : kFirst) {}

    double scale() const { return scale_; }
    // CommonError where the scale falls below 1: it is not small gradients that overflow.
    void end_step(const Groups&, StepReport& report, bool updated) override;
    Rows rows() const override {
        return {.kind = "loss_scale/", .names = {"scale"}, .width = 2, .values = {float(scale_), float(finite_)}};
    }
    void restore(const Rows& rows) override {
        if (dynamic_) scale_ = rows.values[0];
        finite_ = int64_t(rows.values[1]);
    }

  private:
    const bool dynamic_;
    double scale_;
    int64_t finite_ = 0;  // steps since it has changed
};

}  // namespace train70b
