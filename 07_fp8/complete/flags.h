#pragma once
// The flags of chapter 07, and what cannot be combined.
#include "01_single_gpu/complete/flags/flags.h"
#include "01_single_gpu/complete/train_options.h"
#include "07_fp8/complete/fp8.h"
#include "07_fp8/complete/optimizers.h"

namespace train70b {

// --fp8, --fp8-strict, --fp8-history, --fp8-margin; --optimizer adamw|adamw8bit
void add_fp8_flags(Flags& flags, Fp8Options& options, std::string& optimizer);
// Usage error where --dtype excludes one of the two.
void check_precision(const Fp8Options& options, const std::string& optimizer, const TrainOptions& training,
                     bool offloads);
// With --fp8-strict: usage error if a layer cannot be in 8 bits. rows: of a micro-batch on a rank.
void check_fp8(const Fp8Options& options, const LlamaConfig& config, int64_t rows, int64_t tensor_ranks);

}  // namespace train70b
