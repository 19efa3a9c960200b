// adamw_bf16.h on a GPU: kPack elements per thread.
#include "01_single_gpu/core/cuda.cuh"
#include "07_fp8/complete/adamw_bf16.h"

namespace train70b::cuda {
namespace {

template <class G>
__global__ void adamw_bf16_kernel(__nv_bfloat16* param, __nv_bfloat16* exp_avg, __nv_bfloat16* exp_avg_sq,
                                  const G* grad, int64_t n, GlobalIndex index, AdamWFactors<float> f, uint64_t key) {
    const int64_t first = first_element();
    float g[kPack], m[kPack], v[kPack], w[kPack];
    load(g, grad, first, n);
    load(m, exp_avg, first, n);
    load(v, exp_avg_sq, first, n);
    load(w, param, first, n);
    for (int j = 0; j < kPack; ++j) {
        const float gradient = g[j] * f.grad_scale;
        m[j] = f.beta1 * m[j] + (1.0f - f.beta1) * gradient;
        v[j] = f.beta2 * v[j] + (1.0f - f.beta2) * gradient * gradient;
        w[j] = w[j] * f.keep - f.step_size * m[j] / (sqrtf(v[j]) * f.inv_sqrt_correction2 + f.eps);
        const uint64_t noise = random_bits(key, index.of(first + j));
        const auto rounded = [](float x, uint64_t bits) {  // to what the store below does not change
            return __uint_as_float(unsigned(rounded_up_or_down(x, bits)) << 16);
        };
        w[j] = rounded(w[j], noise), m[j] = rounded(m[j], noise >> 16), v[j] = rounded(v[j], noise >> 32);
    }
    store(exp_avg, first, n, m);
    store(exp_avg_sq, first, n, v);
    store(param, first, n, w);
}

}  // namespace

void adamw_bf16(Tensor& param, Tensor& exp_avg, Tensor& exp_avg_sq, const Tensor& grad, const GlobalIndex& index,
                const AdamWStep& step, uint64_t key) {
    using T = __nv_bfloat16;
    with_float(grad.dtype(), [&](auto grad_zero) {
        using G = decltype(grad_zero);
        launch(adamw_bf16_kernel<G>, {blocks_for(param.size())}, param.data<T>(), exp_avg.data<T>(),
               exp_avg_sq.data<T>(), grad.data<G>(), param.size(), index, AdamWFactors<float>(step), key);
    });
}

}  // namespace train70b::cuda
