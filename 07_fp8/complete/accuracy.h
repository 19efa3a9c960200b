#pragma once
// What rounding to 8 bits costs in accuracy: the error of one product.
#include "01_single_gpu/complete/report/table.h"
#include "07_fp8/complete/compose.h"

namespace train70b {

// Mean over rows of |difference| / |row| for a product against the same in double of unrounded operands.
struct ProductErrors {
    std::string recipe;
    double normal = 0;        // Y = X W^T of normal numbers
    double outlier_rows = 0;  // one row of X in 64 is 100 times as large
    double outlier_cols = 0;  // one column of X in 64 is 100 times as large
    double tiny = 0;          // dX = dY W: dY around 1e-7, over six decades
};
std::vector<ProductErrors> product_errors(int64_t rows, int64_t in, int64_t out, uint64_t seed);
Table error_table(const std::vector<ProductErrors>& errors);

}  // namespace train70b
