#pragma once
// Where tokens come from: any text file or folder (one byte, one token), or token shards in llm.c's .bin format
// (256 int32 of header: magic, version, count; then uint16 or uint32 tokens). Everything is memory-mapped.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace train70b {

// Tokens [begin, begin + count) of a sequence.
struct TokenRange {
    int64_t begin, count;
    bool operator==(const TokenRange&) const = default;
};

class Dataset {
  public:
    // val_fraction < 0: 0.1 of a text, 0 of token shards. The validation part is the end of the source; a source that
    // cannot spare one sample for each part is training data as a whole. Usage error for what cannot be read, is too
    // short for one sample of seq_len + 1 tokens, or holds a token outside the vocabulary.
    Dataset(const std::string& path, int64_t vocab, int64_t seq_len, double val_fraction);
    ~Dataset();
    Dataset(const Dataset&) = delete;

    int64_t tokens() const { return total_; }
    int64_t train_tokens() const { return train_; }
    bool is_text() const { return is_text_; }

    // Sample `index` (from 0) of an endless stream of seq_len + 1 tokens each. A pure function of (seed, index): an
    // epoch visits every window of the training part once, in an order and at an alignment of its own, so any run can
    // resume anywhere and any rank can fetch its part alone.
    std::vector<int32_t> sample(uint64_t seed, int64_t index) const;
    int64_t samples_per_epoch() const { return windows_; }

    int64_t validation_samples() const;  // consecutive windows of the validation part; 0: there is none
    std::vector<int32_t> validation_sample(int64_t index) const;

    std::vector<int32_t> read(int64_t begin, int64_t count) const;  // tokens [begin, begin + count) of the source

  private:
    struct File;
    std::vector<std::unique_ptr<File>> files_;
    int64_t vocab_, seq_len_, total_ = 0, train_ = 0, windows_ = 0;
    bool is_text_ = false;
};

}  // namespace train70b
