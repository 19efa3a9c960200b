#include "01_single_gpu/complete/fp16.h"

#include <cmath>

#include "01_single_gpu/complete/step_report.h"
#include "01_single_gpu/ops/round_fp16.h"

namespace train70b {

namespace {

Tensor rounded(const Tensor& x) {
    Tensor y = Tensor::like(x, Memory::workspace);
    copy(y, x);
    round_fp16(y);
    return y;
}

Var fp16_multiply(Tape& tape, const Var& x, Linear& linear) {
    Var y{.data = matmul(rounded(x.data), rounded(linear.weight()), Transpose::b, linear.y_kind)};
    round_fp16(y.data);
    const auto dy16 = std::make_shared<Tensor>();  // of the first step of the backward pass, for the second
    tape.record_wgrad([x = Saved(x), dy16, &linear] {
        Tensor dw = linear.grad();
        matmul_into(dw, *dy16, rounded(x.get()), Transpose::a, 1);
        *dy16 = Tensor();
    });
    tape.record([dx = x.grad, dy = y.grad, dy16, &linear] {
        *dy16 = rounded(*dy);
        Tensor part = matmul(*dy16, rounded(linear.weight()), Transpose::none, linear.dx_kind);
        round_fp16(part);
        accumulate(*dx, part);
    });
    return y;
}

}  // namespace

void use_fp16_products(Llama& model) {
    for (Block& block : model.blocks)
        for (Linear* linear : {&block.qkv, &block.o, &block.feed_forward->gate_up, &block.feed_forward->down})
            linear->multiply = fp16_multiply;
    model.head.multiply = fp16_multiply;
}

void LossScale::end_step(const Groups&, StepReport& report, bool) {
    report.loss_scale = scale_;
    if (!dynamic_) return;
    report.overflowed = std::isfinite(report.loss) && !std::isfinite(report.grad_norm);
    if (report.overflowed) report.skipped = true;
    if (!report.overflowed && ++finite_ < kGrowEvery) return;
    scale_ *= report.overflowed ? 0.5 : 2;
    finite_ = 0;
    if (scale_ < 1)
        throw CommonError(fmt::format(
            "step {}: with --dtype fp16 gradients are not finite even at a loss scale of 1 (try --dtype bf16)",
            report.step));
}

}  // namespace train70b
