#include "07_fp8/complete/adamw8bit.h"

#include "01_single_gpu/core/dispatch.h"

namespace train70b {

namespace cpu {  // adamw8bit_cpu.cpp
decltype(train70b::adamw8bit) adamw8bit;
}
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

AdamW8bit::AdamW8bit(std::vector<Segment> segments, const AdamW::Hyper& hyper, Memory states) : hyper_(hyper) {
    for (const Segment& segment : segments) {
        const BlockLayout blocks{segment.global_index(), segment.data.size()};
        const auto zeros = [&](Shape shape, DType dtype) {
            Tensor x(std::move(shape), dtype, segment.data.device(), states);
            fill(x, 0);
            return x;
        };
        const auto codes = [&] { return zeros({blocks.size}, DType::u8); };  // scales of 0: any code is 0
        states_.push_back({segment,
                           make_master(segment.data, states),
                           {codes(), codes(), zeros({2, blocks.blocks()}, DType::f32)},
                           blocks});
    }
}

MakeOptimizer AdamW8bit::maker(const AdamW::Hyper& hyper) {
    return [hyper](std::vector<Segment> segments, Memory states) {
        return std::make_unique<AdamW8bit>(std::move(segments), hyper, states);
    };
}

void AdamW8bit::update(int64_t step, double lr, double grad_scale) {
    for (State& state : states_)
        adamw8bit(state.segment.data, state.master, state.moments, state.segment.grad, state.blocks,
                  hyper_.at(step, lr, grad_scale, state.segment),
                  random_bits(state.segment.param->key(0), uint64_t(step)));
}

void AdamW8bit::weights_changed() {
    for (State& state : states_)
        if (state.master) copy(state.master, state.segment.data);
}

void AdamW8bit::for_each_state(const StateVisitor& visit) {
    for (State& state : states_) {
        visit(state.segment, "weight", state.master ? state.master : state.segment.data);
        visit(state.segment, "exp_avg", state.moments.exp_avg);
        visit(state.segment, "exp_avg_sq", state.moments.exp_avg_sq);
        visit(state.segment, "scale", state.moments.scale);
    }
}

void AdamW8bit::states_changed() {
    for (State& state : states_)
        if (state.master) copy(state.segment.data, state.master);
}

}  // namespace train70b
