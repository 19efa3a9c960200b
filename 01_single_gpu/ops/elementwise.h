#pragma once
// Operations on each element by itself, random initial values, a transposition of blocks, and the sum of squares.
#include "01_single_gpu/core/tensor.h"

namespace train70b {

void fill(Tensor& x, double value);  // x_i = value; any float, i32, u8

// Which elements of a global matrix a tensor holds: element i of the tensor is element offset + i of a rectangle, and
// the rectangle's (r, c) is the global element (row_begin + r) * global_cols + col_begin + c.
struct GlobalIndex {
    int64_t row_begin = 0, col_begin = 0, cols = 1, global_cols = 1, offset = 0;
    constexpr uint64_t of(int64_t i) const {  // element i
        const int64_t row = (offset + i) / cols, col = (offset + i) % cols;
        return uint64_t((row_begin + row) * global_cols + col_begin + col);
    }
};

// Initial values that do not depend on the layout: each element's random number is a function of its place in the whole
// parameter, so that any shard of any layout creates exactly its own values.
// x_i = std * normal(key, global index of i), with a counter-based generator: SplitMix64's mixing function gives two
// uniform numbers u1 and u2, and Box-Muller a normal one, sqrt(-2 log u1) cos(2 pi u2). The values are rounded to fp32
// first, so that fp32 and fp64 start from the same weights.
void fill_normal(Tensor& x, uint64_t key, const GlobalIndex& index, float std);

// to_i = from_i, of any shapes with the same number of elements. Rounds where the dtypes differ (both are floats then);
// crosses devices.
void copy(Tensor& to, const Tensor& from);

void scale(Tensor& x, double factor);  // x_i *= factor

void add(Tensor& sum, const Tensor& a, const Tensor& b);  // sum_i = a_i + b_i; sum may be a or b; any float dtypes

// to (b, a, w) = from (a, b, w) with its first two dimensions exchanged, whatever the tensors' own shapes; any dtype.
// The two must not overlap.
void swap_blocks(Tensor& to, const Tensor& from, int64_t a, int64_t b);

// out (1) fp64 = sum of x_i^2 over all elements, summed in double: the square of the gradient norm.
void sum_squares(Tensor& out, const Tensor& x);

namespace cpu {  // elementwise.cpp, for the other families' definitions
decltype(train70b::copy) copy;
decltype(train70b::add) add;
}  // namespace cpu

}  // namespace train70b
