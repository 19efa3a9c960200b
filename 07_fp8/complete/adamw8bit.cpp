#include "07_fp8/complete/adamw8bit.h"

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"

namespace train70b {

namespace cpu {

void adamw8bit(Tensor& param, Tensor& master, Moments& moments, const Tensor& grad, const BlockLayout& blocks,
               const AdamWStep& step, uint64_t key) {
    static constexpr MomentLevels kLevels = moment_levels();
    const AdamWFactors<float> f(step);
    with_float(param.dtype(), grad.dtype(), [&](auto param_zero, auto grad_zero) {
        using P = decltype(param_zero);
        constexpr bool has_master = !std::is_same_v<P, float>;
        P* p = param.data<P>();
        float* w = (has_master ? master : param).template data<float>();
        uint8_t *m_code = moments.exp_avg.data<uint8_t>(), *v_code = moments.exp_avg_sq.data<uint8_t>();
        float *m_scale = moments.scale.data<float>(), *v_scale = m_scale + blocks.blocks();
        const auto* g = grad.data<decltype(grad_zero)>();
        parallel_rows(blocks.blocks(), kMomentBlock, [&](int64_t b) {
            const auto [begin, end, global] = blocks.block(b);
            float m[kMomentBlock], v[kMomentBlock], m_most = 0, v_most = 0;
            for (int64_t i = begin; i < end; ++i) {
                const float gradient = float(g[i]) * f.grad_scale;
                const float m_new = f.beta1 * kLevels.first[m_code[i]] * m_scale[b] + (1 - f.beta1) * gradient;
                const float v_new =
                    f.beta2 * kLevels.second[v_code[i]] * v_scale[b] + (1 - f.beta2) * gradient * gradient;
                w[i] = w[i] * f.keep - f.step_size * m_new / (std::sqrt(v_new) * f.inv_sqrt_correction2 + f.eps);
                if constexpr (has_master) p[i] = P(w[i]);
                m[i - begin] = m_new, v[i - begin] = v_new;
                m_most = std::max(m_most, std::abs(m_new)), v_most = std::max(v_most, v_new);
            }
            m_scale[b] = m_most, v_scale[b] = v_most;
            const float m_inverse = m_most > 0 ? 1 / m_most : 0, v_inverse = v_most > 0 ? 1 / v_most : 0;
            for (int64_t i = begin; i < end; ++i) {
                const uint64_t bits = random_bits(key, uint64_t(global + i - begin));
                const float u = float(bits >> 40) * 0x1p-24f, u2 = float(bits & 0xffffff) * 0x1p-24f;
                const float v_now = v[i - begin];
                m_code[i] = random_code(kLevels.first.data(), m[i - begin] * m_inverse, u);
                v_code[i] = std::max<uint8_t>(random_code(kLevels.second.data(), v_now * v_inverse, u2), v_now > 0);
            }
        });
    });
}

}  // namespace cpu

namespace cuda {  // fp8_cuda.cu
decltype(train70b::adamw8bit) adamw8bit;
}

void adamw8bit(Tensor& param, Tensor& master, Moments& moments, const Tensor& grad, const BlockLayout& blocks,
               const AdamWStep& step, uint64_t key) {
    CHECK(param.dtype() == DType::f32 ? !master : master && master.dtype() == DType::f32,
          "a bf16 parameter needs an fp32 master, an fp32 one is its own");
    CHECK(param.size() == grad.size() && param.size() == blocks.size && (!master || master.size() == blocks.size) &&
          is_float(grad.dtype()) && step.step >= 1);
    for (const Tensor& codes : List{moments.exp_avg, moments.exp_avg_sq})
        CHECK(codes.dtype() == DType::u8 && codes.size() == blocks.size, "{} of {}", codes.size(), blocks.size);
    CHECK(moments.scale.dtype() == DType::f32 && moments.scale.size() == 2 * blocks.blocks());
    Span span("adamw8bit", "op", 0,
              bytes_of({param, grad}) + 2 * bytes_of({moments.exp_avg, moments.exp_avg_sq, moments.scale}) +
                  (master ? 2 : 1) * 4.0 * double(param.size()));
    DISPATCH(device_of({param, moments.exp_avg, moments.exp_avg_sq, moments.scale, grad}),
             adamw8bit(param, master, moments, grad, blocks, step, key));
}

static BlockLayout blocks_of(const Segment& segment) { return {segment.global_index(), segment.data.size()}; }

AdamW8bit::AdamW8bit(std::vector<Segment> segments, const Hyper& hyper, Memory states) : AdamW(hyper) {
    for (const Segment& segment : segments) {
        const Tensor& data = segment.data;
        // Scales of 0: any code is 0.
        const auto codes = [&] { return zeros({data.size()}, DType::u8, data.device(), states); };
        states_.push_back({segment, make_master(data, states), codes(), codes(),
                           zeros({2, blocks_of(segment).blocks()}, DType::f32, data.device(), states)});
    }
}

void AdamW8bit::update_segment(State& state, const AdamWStep& step) {
    Segment& segment = state.segment;
    Moments moments{state.exp_avg, state.exp_avg_sq, state.scale};
    adamw8bit(segment.data, state.master, moments, segment.grad, blocks_of(segment), step,
              random_bits(segment.param->key(0), uint64_t(step.step)));
}

}  // namespace train70b
