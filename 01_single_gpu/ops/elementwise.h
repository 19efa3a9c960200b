#pragma once
// Operations on each element by itself, a transposition of blocks, and the sum of squares.
#include "01_single_gpu/core/tensor.h"

namespace train70b {

void fill(Tensor& x, double value);  // x_i = value; any float, i32, u8

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
