#include "07_fp8/complete/adamw_bf16.h"

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"

namespace train70b {

namespace cpu {
void adamw_bf16(Tensor& param, Tensor& exp_avg, Tensor& exp_avg_sq, const Tensor& grad, const GlobalIndex& index,
                const AdamWStep& step, uint64_t key) {
    const AdamWFactors<float> f(step);
    with_float(grad.dtype(), [&](auto grad_zero) {
        bf16 *p = param.data<bf16>(), *m = exp_avg.data<bf16>(), *v = exp_avg_sq.data<bf16>();
        const auto* g = grad.data<decltype(grad_zero)>();
        parallel_elements(param.size(), [=](int64_t i) {
            const float gradient = float(g[i]) * f.grad_scale;
            const float m_new = f.beta1 * float(m[i]) + (1 - f.beta1) * gradient;
            const float v_new = f.beta2 * float(v[i]) + (1 - f.beta2) * gradient * gradient;
            const float w =
                float(p[i]) * f.keep - f.step_size * m_new / (std::sqrt(v_new) * f.inv_sqrt_correction2 + f.eps);
            const uint64_t noise = random_bits(key, index.of(i));
            p[i].bits = rounded_up_or_down(w, noise);
            m[i].bits = rounded_up_or_down(m_new, noise >> 16);
            v[i].bits = rounded_up_or_down(v_new, noise >> 32);
        });
    });
}
}  // namespace cpu

namespace cuda {  // adamw_bf16.cu
decltype(train70b::adamw_bf16) adamw_bf16;
}

void adamw_bf16(Tensor& param, Tensor& exp_avg, Tensor& exp_avg_sq, const Tensor& grad, const GlobalIndex& index,
                const AdamWStep& step, uint64_t key) {
    for (const Tensor& x : List{param, exp_avg, exp_avg_sq})
        CHECK(x.dtype() == DType::bf16 && x.size() == grad.size(), "{} of {}, gradient of {}", name_of(x.dtype()),
              x.size(), grad.size());
    CHECK(is_float(grad.dtype()) && step.step >= 1);
    Span span("adamw_bf16", "op", 0, bytes_of({grad}) + 2 * bytes_of({param, exp_avg, exp_avg_sq}));
    DISPATCH(device_of({param, exp_avg, exp_avg_sq, grad}),
             adamw_bf16(param, exp_avg, exp_avg_sq, grad, index, step, key));
}

AdamWBf16::AdamWBf16(std::vector<Segment> segments, const Hyper& hyper, Memory states) : AdamW(hyper) {
    for (const Segment& segment : segments) {
        const auto moment = [&] { return zeros(segment.data.shape(), DType::bf16, segment.data.device(), states); };
        states_.push_back({segment, {}, moment(), moment()});
    }
}

void AdamWBf16::update_segment(State& state, const AdamWStep& step) {
    Segment& segment = state.segment;
    adamw_bf16(segment.data, state.exp_avg, state.exp_avg_sq, segment.grad, segment.global_index(), step,
               random_bits(segment.param->key(0), uint64_t(step.step)));
}

}  // namespace train70b
