#pragma once
// The tables of chapter 07: what rounding to 8 bits costs in accuracy, what it saves in memory, on the wire and in
// time.
#include "02_data_parallel/runtime/program.h"
#include "07_fp8/compose.h"

namespace train70b {

// ---- accuracy -------------------------------------------------------------------------------------------------------
// Mean over rows of |difference| / |row| for a product against the same in double of unrounded operands.
struct ProductErrors {
    std::string recipe;
    double normal = 0;        // Y = X W^T of normal numbers
    double outlier_rows = 0;  // one row of X in 64 is 100 times as large
    double outlier_cols = 0;  // one column of X in 64 is 100 times as large
    double tiny = 0;          // dX = dY W: dY around 1e-7, over six decades
};
std::vector<ProductErrors> product_errors(int64_t rows, int64_t in, int64_t out, uint64_t seed);
std::string error_table(const std::vector<ProductErrors>& errors);

// Trains the same model with the dtype as it is, with each recipe, and with adamw8bit; a loss per step. Collective.
struct LossCurve {
    std::string name;
    std::vector<double> losses;
};
std::vector<LossCurve> loss_curves(const TrainOptions& options, const Dataset& data, const Layout& layout,
                                   const ZeroOptions& zero, const Precision& chosen, int64_t steps);
std::string curve_table(
    const std::vector<LossCurve>& curves);  // the last ten steps' mean, and its distance from the first
std::string curve_csv(const std::vector<LossCurve>& curves);

// ---- memory ---------------------------------------------------------------------------------------------------------
// Peak activation bytes of one micro-batch of `rows` rows, where all of the blocks' layers keep codes.
int64_t fp8_activations(const LlamaConfig& config, int64_t rows, DType dtype, Recompute recompute, const Recipe& recipe,
                        int64_t tensor_ranks);

struct PrecisionRun {
    std::string name;
    MemoryPeak peak;  // of a step, this rank
    int64_t activations_formula = 0;
    int64_t optimizer_formula = 0;      // of whole parameters: stage 0, one rank
    int64_t gathered = 0, reduced = 0;  // bytes that this rank sends in a step: all-gathers, reductions of gradients
    double step_s = 0;
};
PrecisionRun run_precision(const TrainOptions& options, const Dataset& data, const Layout& layout,
                           const ZeroOptions& zero, const Precision& precision);
std::string memory_table(const std::vector<PrecisionRun>& runs, bool formulas);

// 70b on eight devices of 80 GB: computed.
std::string projection_table();

// ---- time -----------------------------------------------------------------------------------------------------------
// TFLOP/s of products in bf16 and in 8 bits, and the cost of making the codes, by shape. On a GPU: of a CPU's emulation
// there is nothing to learn.
struct ProductTimes {
    int64_t rows, in, out;
    double bf16_s, fp8_s,
        codes_s;  // of the three products of a layer; codes_s: casts of X, dY, W with their transposes
};
ProductTimes time_products(Device device, const Fp8Options& options, int64_t rows, int64_t in, int64_t out);
std::string time_table(const std::vector<ProductTimes>& times, const std::string& recipe);

class Fp8Report {
  public:
    void add_flags(CommandLine& flags);        // --compare, --compare-csv
    void check(const Program& program) const;  // usage errors
    void open();
    void print(Program& program, const Layout& layout, const ZeroOptions& zero, const Precision& chosen);

  private:
    int64_t compare_steps_ = 0;
    std::string compare_csv_;
    std::optional<OutputFile> csv_;
};

}  // namespace train70b
