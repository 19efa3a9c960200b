#pragma once
// Which tokens this rank computes in each micro-batch: the global batch is divided over the data-parallel ranks, each
// sequence over the context-parallel ranks.
#include <map>
#include <memory>
#include <span>
#include <utility>

#include "01_single_gpu/complete/data/data.h"
#include "01_single_gpu/complete/data/prefetch.h"
#include "01_single_gpu/complete/group.h"
#include "01_single_gpu/complete/train_options.h"

namespace train70b {

// The tokens of a sequence that a rank has: those whose rows it computes, and the queries of its attention, both in the
// order of its rows. They differ for Ulysses' ranks (chapter 06), which compute all tokens of their group in attention,
// for some of the heads.
struct RankTokens {
    std::vector<TokenRange> computed, queries;
};

class Batches {
  public:
    Batches(const TrainOptions& options, const Dataset& data)
        : options_(options), sizes_(options.sizes()), data_(data) {}

    const StepSizes& sizes() const { return *sizes_; }
    // The tokens of a sequence that this rank has; empty: all. The rows of a batch are ordered by range, then by
    // sequence.
    std::function<RankTokens(int64_t seq_len)> of_rank;
    RankTokens tokens(int64_t seq_len) const {
        return of_rank ? of_rank(seq_len) : RankTokens{{{0, seq_len}}, {{0, seq_len}}};
    }
    bool sorts_rows = false;  // for the gradient of an embedding on a GPU: Batch::order of training batches

    // From here on a thread reads this rank's samples of the steps first to last, up to kAhead steps before they are
    // asked for. Without this call, and for other steps, they are read when they are asked for; the batches are the
    // same.
    static constexpr int64_t kAhead = 2;
    void start_reading(const Group& dp, int64_t first, int64_t last) {
        reader_.reset();
        if (first > last) return;
        // The thread reads files and fills vectors: it makes no MPI call, computes no op, and books no memory.
        reader_ = std::make_unique<Prefetch<std::vector<Sample>>>(
            first, last, kAhead,
            [this, rank = dp.rank(), size = dp.size()](int64_t step) { return rank_samples(rank, size, step); });
    }
    void stop_reading() { reader_.reset(); }

    // Whether some targets are ignored (masks, --mask-document-ends), so that each step has another number of them.
    bool ignores_targets() const { return data_.has_masks() || options_.mask_document_ends; }
    // Call it before a step's first micro-batch: returns the targets of the global batch that are not ignored, which
    // scale its loss. Where that depends on the data, one message sums them over the ranks that hold other tokens. The
    // next call changes the number: that of the same step, if it is done again.
    const double& begin_step(const Group& dp, const Group& dp_cp, int64_t step);

    // Micro-batches per step and rank.
    int64_t count(const Group& dp, int64_t step) const { return count(dp.rank(), dp.size(), step); }
    // Micro-batch `index` of this rank; steps count from 1. The samples of a step follow those of the steps before it
    // in the stream, and micro-batch m of rank r starts at sample (m * ranks + r) * micro_batch of the step, so every
    // division of the global batch trains on the same tokens. A sequence ramp cuts each sample into pieces. A step
    // without any target has a loss of 0.
    Batch micro_batch(const Group& dp, int64_t step, int64_t index);

    // Evaluation runs in rounds of one batch per data-parallel rank. A rank that has no samples left in a round
    // computes sample 0 with weight 0, because a forward pass may be collective. part: the source.
    int64_t validation_rounds(const Group& dp, size_t part) const {
        const int64_t round = options_.micro_batch * dp.size();
        return (data_.parts()[part].source->validation_samples() + round - 1) / round;
    }
    // loss_scale: 1 / all tokens of the split. Adds to `targets` the number of this rank's that are not ignored.
    Batch validation_batch(const Group& dp, size_t part, int64_t round, int64_t& targets) const;
    double validation_tokens(size_t part) const {
        return double(data_.parts()[part].source->validation_samples()) * double(options_.seq_len);
    }

    // This rank's part of one sequence of count - 1 inputs, of weight 0 in the loss.
    Batch of_one(const std::vector<int32_t>& tokens) const {
        const Sample sample{tokens, {tokens.begin() + 1, tokens.end()}};
        return upload({&sample, 1}, 0);
    }

    std::vector<Sample> global_batch(int64_t step) const {
        std::vector<Sample> list;
        for (int64_t i = 0; i < sizes_->samples(step); ++i)
            list.push_back(train_sample(sizes_->first_sample(step) + i));
        return list;
    }
    double take_seconds() { return std::exchange(seconds_, 0.0); }  // spent here since the last call
    double document_pairs() const {  // of all micro-batches that were made since begin_step
        double sum = 0;
        for (const auto& [index, pairs] : document_pairs_) sum += pairs;
        return sum;
    }

  private:
    int64_t count(int64_t dp_rank, int64_t dp_size, int64_t step) const {
        return (sizes_->samples(step) / options_.micro_batch - dp_rank + dp_size - 1) / dp_size;
    }
    Sample without_document_ends(Sample sample) const;
    Sample train_sample(int64_t index) const { return without_document_ends(data_.sample(options_.seed, index)); }
    // The sequences of a rank's micro-batch, and of its whole step, one micro-batch behind another.
    std::vector<Sample> rank_samples(int64_t dp_rank, int64_t dp_size, int64_t step, int64_t index) const;
    std::vector<Sample> rank_samples(int64_t dp_rank, int64_t dp_size, int64_t step) const;
    int64_t target_count(std::span<const Sample> samples) const;  // on this rank
    Batch upload(std::span<const Sample> samples, double loss_scale, double sequence_scale = 0,
                 bool sorts_rows = false) const;

    const TrainOptions options_;
    const std::shared_ptr<const StepSizes> sizes_;
    const Dataset& data_;
    double seconds_ = 0;
    int64_t counted_step_ = 0;  // the step that begin_step was called for
    double step_targets_ = 0;
    std::map<int64_t, double> document_pairs_;               // by micro-batch of that step
    std::unique_ptr<Prefetch<std::vector<Sample>>> reader_;  // last: its thread uses the above
};

}  // namespace train70b
