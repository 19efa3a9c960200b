#pragma once
// Which tokens this rank computes in each micro-batch: the global batch is divided over the data-parallel ranks, each
// sequence over the context-parallel ranks.
#include <utility>

#include "01_single_gpu/group.h"
#include "01_single_gpu/io/data.h"
#include "01_single_gpu/io/options.h"

namespace train70b {

class Batches {
  public:
    Batches(const TrainOptions& options, const Dataset& data);

    // The tokens of each sequence that this rank computes; empty: all. The rows of a batch are ordered by range, then
    // by sequence.
    std::vector<TokenRange> tokens;
    // The queries of this rank's attention, in the order of its rows; empty: `tokens`. Ulysses' ranks (chapter 06)
    // compute all tokens of their group in attention, for some of the heads.
    std::vector<TokenRange> queries;

    // Micro-batches per step and rank.
    int64_t count(const Group& dp) const { return options_.accumulation(dp.size()); }
    // Micro-batch `index` of this rank; steps count from 1. Sample i of a step is sample (step - 1) * global + i of the
    // stream, and micro-batch m of rank r starts at sample (m * ranks + r) * micro_batch, so every division of the
    // global batch trains on the same tokens.
    Batch micro_batch(const Group& dp, int64_t step, int64_t index);

    // Evaluation runs in rounds of one batch per data-parallel rank. A rank that has no samples left in a round
    // computes sample 0 with weight 0, because a forward pass may be collective.
    int64_t validation_rounds(const Group& dp) const;
    Batch validation_batch(const Group& dp, int64_t round) const;

    std::vector<std::vector<int32_t>> samples(int64_t step) const;  // the global batch of a step
    double take_seconds() { return std::exchange(seconds_, 0.0); }  // spent in micro_batch() since the last call

  private:
    Batch make(const std::vector<std::vector<int32_t>>& samples, double target_tokens) const;
    // starts: of each sample's tokens; ranges: attention's queries.
    void add_documents(Batch& batch, const std::vector<std::vector<int32_t>>& starts,
                       const std::vector<TokenRange>& ranges) const;

    const TrainOptions options_;
    const Dataset& data_;
    double seconds_ = 0;
};

}  // namespace train70b
