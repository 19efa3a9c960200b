#pragma once
// The tables of chapter 07: what 8 bits save in memory, on the wire and in time. What they cost: accuracy.h.
#include "02_data_parallel/runtime/program.h"
#include "07_fp8/complete/accuracy.h"

namespace train70b {

// Peak activation bytes of one micro-batch of `rows` rows, where all of the blocks' layers keep FP8 data.
int64_t fp8_activations(const LlamaConfig& config, int64_t rows, DType dtype, Recompute recompute, const Recipe& recipe,
                        int64_t tensor_ranks);

struct PrecisionRun {
    std::string name;
    MemoryPeak peak;  // of a step, this rank
    int64_t activations_formula = 0;
    int64_t optimizer_formula = 0;      // of full parameters: stage 0, one rank
    int64_t gathered = 0, reduced = 0;  // bytes that this rank sends in a step: all-gathers, reductions of gradients
    double step_s = 0;
};
PrecisionRun run_precision(const TrainOptions& options, const Dataset& data, const TensorComms& layout,
                           const ZeroOptions& zero, const Precision& precision);
Table memory_table(const std::vector<PrecisionRun>& runs, bool formulas);

// TFLOP/s of products in bf16 and in 8 bits, and the cost of the casts, by shape. On a GPU: of a CPU's emulation
// there is nothing to learn.
struct ProductTimes {
    int64_t rows, in, out;
    double bf16_s, fp8_s;  // of the three products of a layer
    double cast_s;         // casts of X, dY, W with their transposes
};
ProductTimes time_products(Device device, const Fp8Options& options, int64_t rows, int64_t in, int64_t out);
Table time_table(const std::vector<ProductTimes>& times, const std::string& recipe);

void say_layout(const Program& program, const Fp8Trainer& composed, const TensorComms& layout, const ZeroOptions& zero,
                const Precision& precision);

// Releases the run first: the tables train models of their own.
void print_tables(Program& program, const TensorComms& layout, const ZeroOptions& zero, const Precision& chosen);

}  // namespace train70b
