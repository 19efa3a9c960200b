#pragma once
// How many sequences a step has, and how long they are. A sample of the data is a window of --seq-len + 1 tokens, and a
// sequence is all of it or a piece.
#include <cstdint>

namespace train70b {

// The same in every step; a chapter may derive others. They must not depend on the layout.
class StepSizes {
  public:
    StepSizes(int64_t global_batch, int64_t seq_len) : global_batch_(global_batch), seq_len_(seq_len) {}
    virtual ~StepSizes() = default;

    virtual int64_t samples(int64_t /*step*/) const { return global_batch_; }                // steps from 1
    virtual int64_t seq_len(int64_t /*step*/) const { return seq_len_; }                     // divides --seq-len
    virtual int64_t first_sample(int64_t step) const { return (step - 1) * global_batch_; }  // of all samples before it
    virtual bool vary() const { return false; }

    int64_t pieces(int64_t step) const { return seq_len_ / seq_len(step); }  // sequences of one sample
    int64_t sequences(int64_t step) const { return samples(step) * pieces(step); }
    int64_t tokens(int64_t step) const { return samples(step) * seq_len_; }
    int64_t tokens_until(int64_t step) const { return first_sample(step) * seq_len_; }

  protected:
    const int64_t global_batch_, seq_len_;
};

}  // namespace train70b
