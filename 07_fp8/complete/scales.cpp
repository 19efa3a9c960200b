// Where scales come from: which elements share one under block-wise scaling, and, on the CPU, the amax of each group of
// elements and the scale of an amax.
#include <bit>
#include <vector>

#include "01_single_gpu/core/cpu.h"
#include "07_fp8/complete/formats.h"
#include "07_fp8/complete/recipes.h"

namespace train70b {

// tag::blockwise[]
Scaling BlockwiseScaling::scaling(Operand::Role role) const {
    // tag::lab-blockwise-scale-groups[]
    return role == Operand::weight ? Scaling::block128 : Scaling::vec128;
    // end::lab-blockwise-scale-groups[]
}

DType BlockwiseScaling::format(Operand::Role) const {
    // tag::lab-blockwise-scale-format[]
    return DType::e4m3;  // also of gradients: 128 neighbours do not need E5M2's range
    // end::lab-blockwise-scale-format[]
}
// end::blockwise[]

namespace cpu {

namespace {
// |x| as the bits of an fp32, which order like the numbers, with infinity above them and NaN above that.
uint32_t magnitude(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffff; }
void raise(float& amax, uint32_t bits) { amax = std::bit_cast<float>(std::max(magnitude(amax), bits)); }

constexpr int64_t kBlock = 128;  // a tile of x: the rows and columns of a block, which fit the cache
}  // namespace

void compute_amax(Tensor& amax, Tensor& amax_t, const Tensor& x, Scaling scaling) {
    const int64_t rows = x.rows(), cols = x.cols();
    const ScaleLayout layout{scaling, rows, cols}, layout_t{scaling, cols, rows};
    with_float(x.dtype(), [&](auto zero) {
        const auto* p = x.data<decltype(zero)>();
        // tag::lab-blockwise-scale-amax[]
        std::vector<uint32_t> row_max(static_cast<size_t>(rows)), col_max(static_cast<size_t>(cols));
        for (int64_t r0 = 0; r0 < rows; r0 += kBlock)
            for (int64_t c0 = 0; c0 < cols; c0 += kBlock) {
                const int64_t r1 = std::min(rows, r0 + kBlock), c1 = std::min(cols, c0 + kBlock);
                std::fill(row_max.begin() + r0, row_max.begin() + r1, 0);
                std::fill(col_max.begin() + c0, col_max.begin() + c1, 0);
                for (int64_t r = r0; r < r1; ++r) {
                    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
                    for (int64_t c = c0; c < c1; ++c) {
                        const uint32_t bits = magnitude(float(p[r * cols + c]));
                        largest = bits > largest ? bits : largest;
                        col_max[size_t(c)] = bits > col_max[size_t(c)] ? bits : col_max[size_t(c)];
                    }
                    row_max[size_t(r)] = largest;
                }
                for (int64_t r = r0; amax && r < r1; ++r)
                    raise(amax.data<float>()[layout.index(r, c0)], row_max[size_t(r)]);
                for (int64_t c = c0; amax_t && c < c1; ++c)
                    raise(amax_t.data<float>()[layout_t.index(c, r0)], col_max[size_t(c)]);
            }
        // end::lab-blockwise-scale-amax[]
    });
}

void compute_scale_inv(Tensor& scale_inv, const Tensor& amax, float factor) {
    // tag::lab-blockwise-scale-scale[]
    constexpr float kSmallest = std::numeric_limits<float>::min();  // 1 / scale_inv is finite
    for (int64_t i = 0; i < scale_inv.size(); ++i) {
        const float largest = amax.data<float>()[i];
        const bool usable = largest > 0 && largest <= std::numeric_limits<float>::max();
        scale_inv.data<float>()[i] = usable ? std::max(largest * factor, kSmallest) : 1.0f;
    }
    // end::lab-blockwise-scale-scale[]
}

}  // namespace cpu
}  // namespace train70b
