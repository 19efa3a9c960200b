#pragma once
// Training data: a text file or a folder of text (one byte is one token), or token shards in llm.c's .bin format (a
// header of 256 int32: magic, version, count; then uint16 or uint32 tokens).
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "01_single_gpu/io/files.h"

namespace train70b {

// Tokens [begin, begin + count) of a sequence.
struct TokenRange {
    int64_t begin, count;
    bool operator==(const TokenRange&) const = default;
};

class Dataset {
  public:
    // val_fraction < 0: 0.1 for text, 0 for token shards. The validation split is the end of the data; it is empty if
    // the data is too short for one sample in each split. Usage error if the data cannot be read, is too short for one
    // sample of seq_len + 1 tokens, or has a token outside the vocabulary.
    Dataset(const std::string& path, int64_t vocab, int64_t seq_len, double val_fraction);
    ~Dataset();
    Dataset(const Dataset&) = delete;

    int64_t tokens() const { return total_; }
    int64_t train_tokens() const { return train_; }
    bool is_text() const { return is_text_; }

    // Sample `index` (from 0) of an infinite stream of samples of seq_len + 1 tokens. A pure function of (seed, index),
    // so a run can resume at any sample and a rank can read its samples independently. An epoch visits every window of
    // the training split once; order and alignment of the windows differ between epochs.
    std::vector<int32_t> sample(uint64_t seed, int64_t index) const;
    int64_t samples_per_epoch() const { return windows_; }

    int64_t validation_samples() const;  // consecutive windows of the validation split
    std::vector<int32_t> validation_sample(int64_t index) const;

    std::vector<int32_t> read(int64_t begin, int64_t count) const;  // tokens [begin, begin + count) of the data
    std::vector<int32_t> opening(int64_t count) const;  // at most count, of the validation split, or of the data

  private:
    struct File;
    std::vector<std::unique_ptr<File>> files_;
    mutable std::optional<InputFile> open_;  // the file read last
    mutable std::string open_path_;
    int64_t vocab_, seq_len_, total_ = 0, train_ = 0, windows_ = 0;
    bool is_text_ = false;
};

}  // namespace train70b
