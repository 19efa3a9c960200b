#pragma once
// Which tokens this rank computes in which micro-batch: the global batch divided over data-parallel ranks, each sequence
// over context-parallel ranks.
#include <utility>

#include "01_single_gpu/group.h"
#include "01_single_gpu/io/data.h"
#include "01_single_gpu/io/options.h"

namespace train70b {

class Batches {
  public:
    Batches(const TrainOptions& options, const Dataset& data);

    // The tokens of each sequence that this rank computes; empty: all. Rows of a batch: range by range, in each of them
    // sequence by sequence.
    std::vector<TokenRange> tokens;

    int64_t count(const Group& dp) const {
        return options_.accumulation(dp.size());
    }  // micro-batches of a step on a rank
    // Micro-batch `index` of this rank; step from 1. Sample i of a step is number (step - 1) * global + i of the stream,
    // and micro-batch m of rank r holds the micro_batch samples from (m * ranks + r) * micro_batch on: any division of the
    // global batch trains on the same tokens.
    Batch micro_batch(const Group& dp, int64_t step, int64_t index);

    // Evaluation goes in rounds of one batch per data rank. A rank for which a round has no samples left computes its first
    // sample again with weight 0, because a forward pass may be collective (chapter 03).
    int64_t validation_rounds(const Group& dp) const;
    Batch validation_batch(const Group& dp, int64_t round) const;

    std::vector<std::vector<int32_t>> samples(int64_t step) const;  // of the global batch
    double take_seconds() { return std::exchange(seconds_, 0.0); }  // spent on micro_batch() since the last call

  private:
    Batch make(const std::vector<std::vector<int32_t>>& samples, double target_tokens) const;

    const TrainOptions options_;
    const Dataset& data_;
    double seconds_ = 0;
};

}  // namespace train70b
