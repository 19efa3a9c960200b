#pragma once
// Which tokens this rank computes in each micro-batch: the global batch is divided over the data-parallel ranks, each
// sequence over the context-parallel ranks.
#include <utility>

#include "01_single_gpu/group.h"
#include "01_single_gpu/io/data.h"
#include "01_single_gpu/io/options.h"

namespace train70b {

// The tokens of a sequence that a rank has: those whose rows it computes, and the queries of its attention, both in the
// order of its rows. They differ for Ulysses' ranks (chapter 06), which compute all tokens of their group in attention,
// for some of the heads.
struct RankTokens {
    std::vector<TokenRange> computed, queries;
};

class Batches {
  public:
    Batches(const TrainOptions& options, const Dataset& data);

    const StepSizes sizes;
    // The tokens of a sequence that this rank has; empty: all. The rows of a batch are ordered by range, then by
    // sequence.
    std::function<RankTokens(int64_t seq_len)> of_rank;
    RankTokens tokens(int64_t seq_len) const;

    // Micro-batches per step and rank.
    int64_t count(const Group& dp, int64_t step) const;
    // Micro-batch `index` of this rank; steps count from 1. The samples of a step follow those of the steps before it in
    // the stream, and micro-batch m of rank r starts at sample (m * ranks + r) * micro_batch of the step, so every
    // division of the global batch trains on the same tokens. A sequence ramp cuts each sample into pieces.
    Batch micro_batch(const Group& dp, int64_t step, int64_t index);

    // Evaluation runs in rounds of one batch per data-parallel rank. A rank that has no samples left in a round
    // computes sample 0 with weight 0, because a forward pass may be collective.
    int64_t validation_rounds(const Group& dp) const;
    Batch validation_batch(const Group& dp, int64_t round) const;

    // This rank's part of one sequence of count - 1 inputs, of weight 0 in the loss.
    Batch of_one(const std::vector<int32_t>& tokens) const;

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
