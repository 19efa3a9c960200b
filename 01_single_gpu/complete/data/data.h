#pragma once
// The training data of a run: one source, or several with weights. docs/data-format.md describes the files, and how
// samples are drawn.
#include <algorithm>

#include "01_single_gpu/complete/data/mixture.h"
#include "01_single_gpu/complete/data/source.h"

namespace train70b {

// Tokens [begin, begin + count) of a sequence.
struct TokenRange {
    int64_t begin, count;
    bool operator==(const TokenRange&) const = default;
};

// Tokens (seq_len + 1), and the target of each but the last: the next token, or -1 if a mask says that it is none.
struct Sample {
    std::vector<int32_t> tokens, targets;
};

class Dataset {
  public:
    // data: a path, or PATH:WEIGHT,PATH:WEIGHT,... A source of weight 0 is held out wholly, for evaluation. Usage error
    // of parse_mixture and Source, and for a file that two sources have.
    Dataset(const std::string& data, int64_t vocab, int64_t seq_len, double val_fraction);

    struct Part {
        std::string name;  // the shortest end of its path that no other source has
        double weight = 1;
        std::unique_ptr<const Source> source;
    };
    const std::vector<Part>& parts() const { return parts_; }
    bool is_text() const {  // all sources
        return std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.source->is_text(); });
    }
    bool is_mixture() const { return parts_.size() > 1; }
    bool has_masks() const {  // any source
        return std::any_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.source->has_masks(); });
    }
    int64_t train_tokens() const {  // of all sources
        int64_t sum = 0;
        for (const Part& part : parts_) sum += part.source->train_tokens();
        return sum;
    }
    int64_t validation_samples() const {
        int64_t sum = 0;
        for (const Part& part : parts_) sum += part.source->validation_samples();
        return sum;
    }

    // Sample `index` (from 0) of the run's stream, seq_len + 1 tokens. A pure function of (seed, index).
    Sample sample(uint64_t seed, int64_t index) const;
    Sample validation_sample(size_t part, int64_t index) const {  // of the validation split of a source
        return read(*parts_[part].source, parts_[part].source->validation_begin(index));
    }

    // At most count tokens: the beginning of the first source's validation split, or of its data.
    std::vector<int32_t> opening(int64_t count) const;

  private:
    Sample read(const Source& source, int64_t begin) const;

    std::vector<Part> parts_;
    std::unique_ptr<const Mixture> mixture_;
    int64_t seq_len_;
};

// A text for recordings, which look at no token of it: a temporary file without a name.
class EmptyText {
  public:
    explicit EmptyText(int64_t bytes);
    std::string path() const { return "/dev/fd/" + std::to_string(fileno(file_.get())); }

  private:
    std::unique_ptr<FILE, int (*)(FILE*)> file_{std::tmpfile(), std::fclose};
};

// Every path that --data names: files and folders of all sources, and the masks of single shards.
std::vector<std::string> data_paths(const std::string& data);

// Documents packed into one sequence (--document-token): a document ends with the document token. Positions restart
// with each document, and a token attends to the tokens of its own document only. The token after the end is predicted
// as any other.
//
//     tokens       a b $ c d e $ f        $: the document token
//     starts       0 0 0 3 3 3 3 7        index in the sequence of the first token of each token's document
//     positions    0 1 2 0 1 2 3 0        t - starts[t]
//
// The starts of the first seq_len tokens of a sample. A function of the sample alone: every rank computes the same,
// whichever part of the sequence it holds.
std::vector<int32_t> document_starts(const std::vector<int32_t>& sample, int64_t seq_len, int64_t document_token);

// The first key that each query sees inside its document and a window of so many tokens, itself the last: the later of
// the two.
std::vector<int32_t> window_starts(const std::vector<int32_t>& document_starts, int64_t window);

// Pairs (query, key) of one sequence that causal attention inside documents computes: the sum of t - starts[t] + 1. One
// document: T (T+1) / 2.
double document_pairs(const std::vector<int32_t>& starts);

}  // namespace train70b
