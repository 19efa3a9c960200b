#pragma once
// AdamW on bf16 weights and moments without fp32 copies: 6 bytes per parameter instead of 14. An update of less
// than half a unit in the last place, 2^-9 of the weight, would be lost in rounding to nearest; with stochastic
// rounding (Gupta et al. 2015; Zamirai et al. 2020) it is made as often as it is large, so that the mean is right:
//
//     bf16 = upper half of (bits of the fp32 + a random number of 16 bits)
//
// The arithmetic is fp32. Random numbers depend on the parameter, the step and the element's global index, so all
// layouts round alike.
#include <bit>

#include "01_single_gpu/complete/optimizer.h"
#include "01_single_gpu/core/random.h"

namespace train70b {

// The upper 16 bits, as those of a bf16. noise: 16 random bits. Infinities and NaNs stay what they are.
constexpr uint16_t rounded_up_or_down(float x, uint64_t noise) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if ((bits & 0x7f800000) == 0x7f800000) return uint16_t(bits >> 16 | ((bits & 0xffff) != 0 ? 0x40 : 0));
    return uint16_t((bits + uint32_t(noise & 0xffff)) >> 16);
}

// As adamw() of ops.h; param and moments bf16. key: of the random numbers; depends on the parameter and the step.
void adamw_bf16(Tensor& param, Tensor& exp_avg, Tensor& exp_avg_sq, const Tensor& grad, const GlobalIndex& index,
                const AdamWStep& step, uint64_t key);

class AdamWBf16 : public AdamW {
  public:
    AdamWBf16(std::vector<Segment> segments, const Hyper& hyper, Memory states = Memory::optimizer);
    static MakeOptimizer maker(const Hyper& hyper) { return maker_of<AdamWBf16>(hyper); }

  private:
    void update_segment(State& state, const AdamWStep& step) override;
};

}  // namespace train70b
