// fill_normal.h on the CPU: the definition that fill_normal.cu is tested against. Then checks and dispatch.
#include "01_single_gpu/ops/fill_normal.h"

#include <cmath>
#include <numbers>

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"
#include "01_single_gpu/core/random.h"

namespace train70b {

namespace cpu {

void fill_normal(Tensor& x, uint64_t key, const GlobalIndex& index, float std) {
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        T* p = x.data<T>();
        parallel_ranges(x.size(), 1024, [=](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                const uint64_t bits = random_bits(key, index.of(i));
                const double u1 = (double(bits >> 32) + 0.5) * 0x1p-32, u2 = double(bits & 0xffffffff) * 0x1p-32;
                const double normal = std::sqrt(-2 * std::log(u1)) * std::cos(2 * std::numbers::pi * u2);
                p[i] = T(float(std * normal));
            }
        });
    });
}

}  // namespace cpu

namespace cuda {  // fill_normal.cu
decltype(train70b::fill_normal) fill_normal;
}  // namespace cuda

void fill_normal(Tensor& x, uint64_t key, const GlobalIndex& index, float std) {
    CHECK(is_float(x.dtype()) && index.cols > 0 && index.col_begin + index.cols <= index.global_cols);
    Span span("fill_normal", "op", 0, bytes_of({x}));
    DISPATCH(x.device(), fill_normal(x, key, index, std));
}

}  // namespace train70b
