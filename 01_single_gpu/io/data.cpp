#include "01_single_gpu/io/data.h"

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/random.h"

namespace train70b {

namespace fs = std::filesystem;

// A contiguous range of the data's tokens. Not open: a folder may have more files than a process may open.
struct Dataset::File {
    std::string path;
    int64_t bytes = 0, header = 0;
    int64_t begin = 0, count = 0;  // index of the first token, number of tokens
    int width = 1;                 // bytes per token

    File(const std::string& path, bool shard) : path(path) {
        const InputFile file = open();
        count = bytes = file.bytes();
        if (shard) read_header(file);
    }

    InputFile open() const {
        return {"--data " + path, path, "must be a text file, a folder of text, or .bin token shards"};
    }

    void read_header(const InputFile& file) {
        struct Format {
            int32_t magic, version;
            int width;
        };
        constexpr Format kFormats[] = {{20240520, 1, 2}, {20240801, 7, 4}};  // llm.c: GPT-2 and Llama-3 token files
        int32_t fields[256] = {};
        header = sizeof(fields);
        if (bytes < header)
            usage_error("--data {}: truncated: {} bytes, but a .bin shard begins with a header of {} bytes", path,
                        bytes, header);
        file.read(0, fields, header);
        const auto format = std::find_if(std::begin(kFormats), std::end(kFormats),
                                         [&](const Format& f) { return f.magic == fields[0]; });
        if (format == std::end(kFormats))
            usage_error("--data {}: magic number {} (must be {} for uint16 or {} for uint32 tokens)", path, fields[0],
                        kFormats[0].magic, kFormats[1].magic);
        if (format->version != fields[1])
            usage_error("--data {}: version {} of magic number {} (must be {})", path, fields[1], fields[0],
                        format->version);
        width = format->width;
        count = fields[2];
        if (count < 0 || bytes != header + count * width)
            usage_error(
                "--data {}: truncated or corrupt: the header says {} tokens, {} bytes in total, but the file has {} "
                "bytes",
                path, count, header + std::max<int64_t>(count, 0) * width, bytes);
    }

    // Appends tokens [from, from + number) of this file.
    void append(const InputFile& file, int64_t from, int64_t number, std::vector<uint32_t>& tokens) const {
        std::vector<unsigned char> raw(size_t(number * width));
        file.read(header + from * width, raw.data(), number * width);
        for (int64_t i = 0; i < number; ++i) {
            uint16_t narrow = raw[size_t(i)];
            uint32_t wide = narrow;
            if (width == 2) std::memcpy(&narrow, &raw[size_t(2 * i)], 2), wide = narrow;
            if (width == 4) std::memcpy(&wide, &raw[size_t(4 * i)], 4);
            tokens.push_back(wide);
        }
    }
};

Dataset::~Dataset() = default;

Dataset::Dataset(const std::string& path, int64_t vocab, int64_t seq_len, double val_fraction)
    : vocab_(vocab), seq_len_(seq_len) {
    std::vector<std::string> texts, shards;
    const auto take = [&](const fs::path& file) {
        (file.extension() == ".bin" ? shards : texts).push_back(file.string());
    };
    std::error_code error;
    if (fs::is_directory(path, error)) {
        for (auto it = fs::recursive_directory_iterator(path, error);
             !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
            std::error_code unknown;  // a link that leads nowhere, for one
            if (it->path().filename().string().starts_with("."))
                it.disable_recursion_pending();
            else if (it->is_regular_file(unknown))
                take(it->path());
        }
        if (error) usage_error("--data {}: cannot be read: {} (must be a folder of text)", path, error.message());
        if (texts.empty() && shards.empty())
            usage_error("--data {}: the folder has no files (must contain text files or .bin token shards)", path);
    } else {
        take(path);
    }
    is_text_ = shards.empty();  // a folder with any .bin file is a folder of shards
    std::vector<std::string>& names = is_text_ ? texts : shards;
    std::sort(names.begin(), names.end());
    for (const std::string& name : names) {
        File& file = *files_.emplace_back(std::make_unique<File>(name, !is_text_));
        file.begin = total_;
        total_ += file.count;
        constexpr int64_t kScan = 1 << 28, kPiece = 1 << 20;  // tokens after kScan are checked when they are read
        if (file.width == 1 && vocab > 255) continue;
        const InputFile open = file.open();
        std::vector<uint32_t> tokens;
        for (int64_t i = 0; i < std::min(file.count, kScan); ++i) {
            if (i % kPiece == 0) tokens.clear(), file.append(open, i, std::min(kPiece, file.count - i), tokens);
            if (const uint32_t token = tokens[size_t(i % kPiece)]; token >= uint64_t(vocab))
                usage_error("--data {}: token {} at position {} is outside the vocabulary (try --vocab {} or more)",
                            name, token, i, uint64_t(token) + 1);
        }
    }
    const int64_t need = seq_len + 1;
    if (total_ < 2) usage_error("--data {}: {} tokens, but at least --seq-len + 1 = {} are needed", path, total_, need);
    if (total_ < need)
        usage_error("--data {}: {} tokens, but at least --seq-len + 1 = {} are needed (try --seq-len {})", path, total_,
                    need, total_ - 1);
    const double fraction = val_fraction >= 0 ? val_fraction : (is_text_ ? 0.1 : 0.0);
    const int64_t validation = static_cast<int64_t>(fraction * double(total_));
    train_ = validation >= need && total_ - validation >= need ? total_ - validation : total_;
    windows_ = std::max<int64_t>(1, (train_ - 1) / seq_len - 1);  // one window is reserved for the alignment
}

namespace {
// A pseudorandom permutation of [0, n): a four-round Feistel network over the next even power of two, applied until the
// result is below n ("cycle walking", Black & Rogaway 2002).
int64_t permute(int64_t index, int64_t n, uint64_t key) {
    int half = 1;
    while ((int64_t(1) << (2 * half)) < n) ++half;
    const uint64_t mask = (uint64_t(1) << half) - 1;
    uint64_t x = index;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (int round = 0; round < 4; ++round) {
            const uint64_t next = left ^ (random_bits(key + round, right) & mask);
            left = right;
            right = next;
        }
        x = (left << half) | right;
    } while (x >= uint64_t(n));
    return x;
}
}  // namespace

std::vector<int32_t> Dataset::sample(uint64_t seed, int64_t index) const {
    const int64_t epoch = index / windows_, slack = train_ - 1 - windows_ * seq_len_;
    const uint64_t key = random_bits(seed, epoch);
    const int64_t alignment = static_cast<int64_t>(random_bits(key, 0) % uint64_t(slack + 1));
    return read(alignment + permute(index % windows_, windows_, key) * seq_len_, seq_len_ + 1);
}

int64_t Dataset::validation_samples() const { return total_ == train_ ? 0 : (total_ - train_ - 1) / seq_len_; }

std::vector<int32_t> Dataset::validation_sample(int64_t index) const {
    return read(train_ + index * seq_len_, seq_len_ + 1);
}

std::vector<int32_t> Dataset::opening(int64_t count) const {
    const int64_t begin = total_ == train_ ? 0 : train_;
    return read(begin, std::min(count, total_ - begin));
}

std::vector<int32_t> Dataset::read(int64_t begin, int64_t count) const {
    CHECK(begin >= 0 && begin + count <= total_, "tokens [{}, {}) of {}", begin, begin + count, total_);
    std::vector<uint32_t> tokens;
    tokens.reserve(size_t(count));
    auto file = std::upper_bound(files_.begin(), files_.end(), begin,
                                 [](int64_t at, const std::unique_ptr<File>& f) { return at < f->begin + f->count; });
    for (int64_t at = begin; at < begin + count; ++file) {
        const File& part = **file;
        const int64_t from = at - part.begin, number = std::min(part.count - from, begin + count - at);
        if (number == 0) continue;
        if (open_path_ != part.path) open_.emplace(part.open()), open_path_ = part.path;
        part.append(*open_, from, number, tokens);
        for (int64_t i = from; i < from + number; ++i)
            if (const uint32_t token = tokens[size_t(part.begin + i - begin)]; token >= uint64_t(vocab_))
                throw std::runtime_error(fmt::format(
                    "--data {}: token {} at position {} is outside the vocabulary of {}", part.path, token, i, vocab_));
        at += number;
    }
    return {tokens.begin(), tokens.end()};
}

}  // namespace train70b
