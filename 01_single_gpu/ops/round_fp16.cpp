#include "01_single_gpu/ops/round_fp16.h"

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"

namespace train70b {

namespace {
// Without branches, so that loops of it vectorize.
inline float nearest_fp16(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffff;
    const bool is_small = magnitude < 0x38800000;                                    // 2^-14: the subnormals
    const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1)) & ~0x1fffu;  // ten bits of mantissa stay
    const float sum = std::bit_cast<float>(is_small ? magnitude : 0) + 0.5f;         // whose last bit is 2^-24
    uint32_t rounded = is_small ? std::bit_cast<uint32_t>(sum - 0.5f) : normal;
    rounded = rounded > 0x477fe000 ? 0x7f800000 : rounded;   // 65504
    rounded = magnitude > 0x7f800000 ? magnitude : rounded;  // not a number
    return std::bit_cast<float>(rounded | (bits & 0x80000000));
}
}  // namespace

float to_fp16(float x) { return nearest_fp16(x); }

void round_fp16(Tensor& x) {
    CHECK(x.dtype() == DType::f32 && x.device() != Device::cuda, "{}", name_of(x.dtype()));
    Span span("round_fp16", "op", 0, 2 * bytes_of({x}));
    if (x.device() == Device::meta) return;
    float* values = x.data<float>();
    cpu::parallel_elements(x.size(), [=](int64_t i) { values[i] = nearest_fp16(values[i]); });
}

}  // namespace train70b
