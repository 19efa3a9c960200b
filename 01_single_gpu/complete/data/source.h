#pragma once
// One source of training data: a text file or a folder of text (one byte is one token), or token shards in llm.c's .bin
// format, with or without masks. docs/data-format.md describes the files.
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "01_single_gpu/core/files.h"

namespace train70b {

// Data files that stay open from one sample to the next, as many as the limit allows: then all are closed. May be used
// by several threads, like InputFile::read.
class OpenFiles {
  public:
    OpenFiles();  // as many as a quarter of the process's limit
    // Throws, naming the file, if it cannot be opened or has another size than it had.
    std::shared_ptr<const InputFile> get(const std::string& path, int64_t bytes);

  private:
    size_t most_;
    std::mutex mutex_;
    std::unordered_map<std::string, std::shared_ptr<const InputFile>> files_;  // by path
};

class Source {
  public:
    // val_fraction < 0: 0.1 for text, 0 for token shards; 1: everything is held out. The validation split is the end of
    // the data; it is empty if the data is too short for one sample in each split. Usage error if the data cannot be
    // read, is too short for one sample of seq_len + 1 tokens, has a token outside the vocabulary, or if a mask does
    // not match its shard.
    Source(const std::string& path, int64_t vocab, int64_t seq_len, double val_fraction,
           std::shared_ptr<OpenFiles> open_files = std::make_shared<OpenFiles>());
    ~Source();
    Source(const Source&) = delete;

    const std::string path;
    int64_t tokens() const { return total_; }
    int64_t train_tokens() const { return train_; }
    bool is_text() const { return is_text_; }
    bool has_masks() const { return has_masks_; }
    std::vector<std::string> files() const;  // of tokens, in order

    // A sample is a window of seq_len + 1 tokens. These are the places of the first tokens of sample `index` (from 0)
    // of an infinite stream, and of the consecutive windows of the validation split. The stream is a pure function of
    // (seed, index), so a run can resume at any sample and a rank can read its samples independently; an epoch visits
    // every window of the training split once, in an order and alignment of its own.
    int64_t train_begin(uint64_t seed, int64_t index) const;
    int64_t validation_begin(int64_t index) const { return train_ + index * seq_len_; }
    int64_t samples_per_epoch() const { return windows_; }
    int64_t validation_samples() const { return total_ == train_ ? 0 : (total_ - train_ - 1) / seq_len_; }
    std::vector<int32_t> window(uint64_t seed, int64_t index) const {
        return read(train_begin(seed, index), seq_len_ + 1);
    }
    std::vector<int32_t> validation_window(int64_t index) const { return read(validation_begin(index), seq_len_ + 1); }

    // Tokens [begin, begin + count) of the data; of their masks one byte per token: 1, or 0 where the token is no
    // target. Both throw, naming the file, if it has vanished or changed since.
    std::vector<int32_t> read(int64_t begin, int64_t count) const;
    std::vector<uint8_t> read_mask(int64_t begin, int64_t count) const;

  private:
    struct File;
    void list_files(std::vector<std::string>& texts, std::vector<std::string>& shards,
                    std::vector<std::string>& masks) const;
    void add_masks(const std::vector<std::string>& masks);
    void scan() const;
    template <class T>
    std::vector<T> read_files(int64_t begin, int64_t count, bool masks) const;  // tokens, or masks

    const std::shared_ptr<OpenFiles> open_files_;
    std::vector<std::unique_ptr<File>> files_;
    int64_t vocab_, seq_len_, total_ = 0, train_ = 0, windows_ = 0;
    bool is_text_ = false, has_masks_ = false;
};

// The mask of a shard: NAME.mask.bin of NAME.bin.
std::string mask_path(const std::string& shard);

}  // namespace train70b
