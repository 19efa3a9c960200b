#include "01_single_gpu/ops/round_fp16.h"

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"

namespace train70b {

void round_fp16(Tensor& x) {
    CHECK(x.dtype() == DType::f32 && x.device() != Device::cuda, "{}", name_of(x.dtype()));
    Span span("round_fp16", "op", 0, 2 * bytes_of({x}));
    if (x.device() == Device::meta) return;
    float* values = x.data<float>();
    cpu::parallel_elements(x.size(), [=](int64_t i) { values[i] = to_fp16(values[i]); });
}

}  // namespace train70b
