#pragma once
// Initial values that do not depend on the layout: each element's random number is a function of its place in the whole
// parameter, so that any shard of any layout creates exactly its own values.
#include "01_single_gpu/core/tensor.h"

namespace train70b {

// Which elements of a global matrix a tensor holds: element i of the tensor is element offset + i of a rectangle, and
// the rectangle's (r, c) is the global element (row_begin + r) * global_cols + col_begin + c.
struct GlobalIndex {
    int64_t row_begin = 0, col_begin = 0, cols = 1, global_cols = 1, offset = 0;
    constexpr uint64_t of(int64_t i) const {  // element i
        const int64_t row = (offset + i) / cols, col = (offset + i) % cols;
        return uint64_t((row_begin + row) * global_cols + col_begin + col);
    }
};

// x_i = std * normal(key, global index of i), with a counter-based generator: SplitMix64's mixing function gives two
// uniform numbers u1 and u2, and Box-Muller a normal one, sqrt(-2 log u1) cos(2 pi u2). The values are rounded to fp32
// first, so that fp32 and fp64 start from the same weights.
void fill_normal(Tensor& x, uint64_t key, const GlobalIndex& index, float std);

}  // namespace train70b
