#pragma once
// The flags of chapter 07, and what cannot be combined.
#include "01_single_gpu/flags/flags.h"
#include "07_fp8/fp8.h"

namespace train70b {

// --fp8, --fp8-strict, --fp8-history, --fp8-margin; --optimizer adamw|adamw8bit
void add_fp8_flags(Flags& flags, Fp8Options& options, std::string& optimizer);
// Usage error where --dtype excludes one of the two.
void check_precision(const Fp8Options& options, const std::string& optimizer, const std::string& dtype);
// With --fp8-strict: usage error if a layer cannot be in 8 bits. rows: of a micro-batch on a rank.
void check_fp8(const Fp8Options& options, const LlamaConfig& config, int64_t rows, int64_t tensor_ranks);

// One value of --optimizer. To add one, add it to the list in flags.cpp: memory, plans and checkpoints follow.
struct OptimizerEntry {
    std::string name;
    MakeOptimizer (*maker)(const AdamW::Hyper& hyper);
    DType (*moments)(DType dtype);  // the dtype of both moments; dtype: of the parameters
    int64_t scale_block = 0;        // elements of a row whose moments share two fp32 scales; 0: no scales
};
const std::vector<OptimizerEntry>& optimizers();
const OptimizerEntry& find_optimizer(const std::string& name);  // usage error for an unknown name
MakeOptimizer make_optimizer_of(const std::string& name, const AdamW::Hyper& hyper);
// Per parameter: of the two moments and their scales; and with the master weight where dtype needs one.
double moment_bytes(const std::string& optimizer, DType dtype);
double state_bytes(const std::string& optimizer, DType dtype);

}  // namespace train70b
