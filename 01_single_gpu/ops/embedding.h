#pragma once
// The embedding table: one row of E numbers for each token of the vocabulary.
#include <cstdint>
#include <vector>

#include "01_single_gpu/core/tensor.h"

namespace train70b {

// y (R, E) = table[tokens - first_row]; tokens (R) i32, table (V_l, E). The table holds the V_l rows of the vocabulary
// from first_row on; a token outside them gives zeros, because its row is on another rank (chapter 04).
void embedding(Tensor& y, const Tensor& tokens, const Tensor& table, int64_t first_row = 0);

// dtable (V_l, E)[t - first_row] += the sum of dy (R, E) over the rows whose token is t: in the order of the rows; on a
// GPU, in parts of up to 64 rows each, whose sums are added in their order.
// order (R) i32, optional: rows_by_token() of the tokens. A GPU needs it; without it, the host reads the tokens and
// sorts. The CPU does not use it.
void embedding_backward(Tensor& dtable, const Tensor& tokens, const Tensor& dy, int64_t first_row = 0,
                        const Tensor& order = {});

// The rows sorted by their tokens, which must not be negative; rows of one token stay in their order.
std::vector<int32_t> rows_by_token(const std::vector<int32_t>& tokens);

}  // namespace train70b
