#pragma once
// What rounding to 8 bits costs in accuracy: of one product, and of a training run.
#include "01_single_gpu/report/table.h"
#include "07_fp8/compose.h"

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

// Trains the same model with the dtype as it is, with each recipe, and with adamw8bit; a loss per step. Collective.
struct LossCurve {
    std::string name;
    std::vector<double> losses;
};
std::vector<LossCurve> loss_curves(const TrainOptions& options, const Dataset& data, const TensorComms& layout,
                                   const ZeroOptions& zero, const Precision& chosen, int64_t steps);
Table curve_table(
    const std::vector<LossCurve>& curves);  // the mean of the last ten steps, and its distance from the first
Table curve_rows(const std::vector<LossCurve>& curves);  // for CSV: a row per step, a column per run

}  // namespace train70b
