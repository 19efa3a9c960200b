// adamw.h on a GPU: kPack elements per thread.
#include "01_single_gpu/core/cuda.cuh"
#include "01_single_gpu/ops/adamw.h"

namespace train70b::cuda {
namespace {

template <class P, class G>
__global__ void adamw_kernel(P* param, float* master, float* exp_avg, float* exp_avg_sq, const G* grad, int64_t n,
                             AdamWFactors<float> f) {
    const int64_t i = first_element();
    float g[kPack], m[kPack], v[kPack], w[kPack];
    load(g, grad, i, n);
    load(m, exp_avg, i, n);
    load(v, exp_avg_sq, i, n);
    if (master)
        load(w, master, i, n);
    else
        load(w, param, i, n);
    for (int j = 0; j < kPack; ++j) {
        const float gradient = g[j] * f.grad_scale;
        m[j] = f.beta1 * m[j] + (1.0f - f.beta1) * gradient;
        v[j] = f.beta2 * v[j] + (1.0f - f.beta2) * gradient * gradient;
        w[j] = w[j] * f.keep - f.step_size * m[j] / (sqrtf(v[j]) * f.inv_sqrt_correction2 + f.eps);
    }
    store(exp_avg, i, n, m);
    store(exp_avg_sq, i, n, v);
    if (master) store(master, i, n, w);
    store(param, i, n, w);
}

}  // namespace

void adamw(Tensor& param, Tensor& master, Tensor& exp_avg, Tensor& exp_avg_sq, const Tensor& grad,
           const AdamWStep& step) {
    const AdamWFactors<float> factors(step);
    with_float(param.dtype(), grad.dtype(), [&]<class P, class G>(P, G) {
        launch(adamw_kernel<P, G>, {blocks_for(param.size())}, param, OrNull{master}, exp_avg, exp_avg_sq, grad,
               param.size(), factors);
    });
}

}  // namespace train70b::cuda
