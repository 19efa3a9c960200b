// adamw.h on the CPU: the definition that adamw.cu is tested against. Then checks and dispatch.
#include "01_single_gpu/ops/adamw.h"

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"

namespace train70b {

namespace cpu {

void adamw(Tensor& param, Tensor& master, Tensor& exp_avg, Tensor& exp_avg_sq, const Tensor& grad,
           const AdamWStep& step) {
    with_float(param.dtype(), grad.dtype(), [&]<class P, class G>(P, G) {
        using C = Wide<P>;
        constexpr bool has_master = !std::is_same_v<P, C>;
        P* p = param.data<P>();
        C* w = (has_master ? master : param).template data<C>();
        C *m = exp_avg.data<C>(), *v = exp_avg_sq.data<C>();
        const G* g = grad.data<G>();
        const AdamWFactors<C> f(step);
        parallel_elements(param.size(), [=](int64_t i) {
            const C gradient = C(g[i]) * f.grad_scale;
            m[i] = f.beta1 * m[i] + (1 - f.beta1) * gradient;
            v[i] = f.beta2 * v[i] + (1 - f.beta2) * gradient * gradient;
            w[i] = w[i] * f.keep - f.step_size * m[i] / (std::sqrt(v[i]) * f.inv_sqrt_correction2 + f.eps);
            if constexpr (has_master) p[i] = P(w[i]);
        });
    });
}

}  // namespace cpu

namespace cuda {  // adamw.cu
decltype(train70b::adamw) adamw;
}  // namespace cuda

void adamw(Tensor& param, Tensor& master, Tensor& exp_avg, Tensor& exp_avg_sq, const Tensor& grad,
           const AdamWStep& step) {
    const DType stats = stats_dtype(param.dtype());
    CHECK(param.dtype() == stats ? !master : master && master.dtype() == stats,
          "a bf16 parameter needs an fp32 master, another one is its own");
    CHECK(param.size() == grad.size() && param.size() == exp_avg.size() && param.size() == exp_avg_sq.size() &&
          (!master || master.size() == param.size()));
    CHECK(exp_avg.dtype() == stats && exp_avg_sq.dtype() == stats && is_float(grad.dtype()) && step.step >= 1);
    Span span("adamw", "op", 0,
              bytes_of({param, grad}) + 2 * bytes_of({exp_avg, exp_avg_sq}) + (master ? 2 : 1) * bytes_of({exp_avg}));
    DISPATCH(device_of({param, exp_avg, exp_avg_sq, grad}), adamw(param, master, exp_avg, exp_avg_sq, grad, step));
}

}  // namespace train70b
