#include "01_single_gpu/io/data.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/random.h"

namespace train70b {

namespace fs = std::filesystem;

// One memory-mapped file: a contiguous range of the data's tokens.
struct Dataset::File {
    std::string path;
    const unsigned char* map = nullptr;
    size_t bytes = 0, header = 0;
    int64_t begin = 0, count = 0;  // index of the first token, number of tokens
    int width = 1;                 // bytes per token

    File(const std::string& path, bool shard) : path(path) {
        struct stat info {};
        if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode))
            usage_error(
                "--data {}: is not a regular file (must be a text file, a folder of text, or .bin token shards)", path);
        const int fd = ::open(path.c_str(), O_RDONLY);
        if (fd < 0 || fstat(fd, &info) != 0) {
            const std::string why = std::strerror(errno);
            if (fd >= 0) ::close(fd);
            usage_error("--data {}: cannot be read: {} (must be a text file, a folder of text, or .bin token shards)",
                        path, why);
        }
        bytes = info.st_size;
        if (bytes > 0) map = static_cast<const unsigned char*>(mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, fd, 0));
        ::close(fd);
        if (map == MAP_FAILED) {
            map = nullptr;
            usage_error("--data {}: cannot be mapped ({})", path, std::strerror(errno));
        }
        count = bytes;
        if (shard) read_header();
    }
    File(const File&) = delete;
    ~File() {
        if (map) munmap(const_cast<unsigned char*>(map), bytes);
    }

    void read_header() {
        constexpr int32_t kMagic16 = 20240520, kMagic32 = 20240801;  // llm.c: GPT-2 and Llama-3 token files
        int32_t fields[256] = {};
        header = sizeof(fields);
        if (bytes < header)
            usage_error("--data {}: truncated: {} bytes, but a .bin shard begins with a header of {} bytes", path,
                        bytes, header);
        std::memcpy(fields, map, header);
        if (fields[0] != kMagic16 && fields[0] != kMagic32)
            usage_error("--data {}: magic number {} (must be {} for uint16 or {} for uint32 tokens)", path, fields[0],
                        kMagic16, kMagic32);
        width = fields[0] == kMagic16 ? 2 : 4;
        count = fields[2];
        if (count < 0 || bytes != header + size_t(count) * width)
            usage_error(
                "--data {}: truncated or corrupt: the header says {} tokens, {} bytes in total, but the file has {} "
                "bytes",
                path, count, header + size_t(std::max<int64_t>(count, 0)) * width, bytes);
    }

    uint32_t token(int64_t i) const {  // i: index in this file
        if (width == 1) return map[i];
        uint16_t narrow;
        uint32_t wide;
        if (width == 2) return std::memcpy(&narrow, map + header + 2 * i, 2), narrow;
        return std::memcpy(&wide, map + header + 4 * i, 4), wide;
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
        for (auto it = fs::recursive_directory_iterator(path, error); it != fs::recursive_directory_iterator(); ++it) {
            if (it->path().filename().string().starts_with("."))
                it.disable_recursion_pending();
            else if (it->is_regular_file())
                take(it->path());
        }
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
        constexpr int64_t kScan = 1 << 28;  // tokens after these are checked when they are read
        for (int64_t i = 0; i < std::min(file.count, kScan); ++i)
            if (file.token(i) >= uint64_t(vocab))
                usage_error("--data {}: token {} at position {} is outside the vocabulary (try --vocab {} or more)",
                            name, file.token(i), i, uint64_t(file.token(i)) + 1);
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

std::vector<int32_t> Dataset::read(int64_t begin, int64_t count) const {
    CHECK(begin >= 0 && begin + count <= total_, "tokens [{}, {}) of {}", begin, begin + count, total_);
    std::vector<int32_t> tokens(count);
    auto file = std::upper_bound(files_.begin(), files_.end(), begin,
                                 [](int64_t at, const std::unique_ptr<File>& f) { return at < f->begin + f->count; });
    for (int64_t i = 0; i < count; ++i) {
        while (begin + i >= (*file)->begin + (*file)->count) ++file;
        const uint32_t token = (*file)->token(begin + i - (*file)->begin);
        CHECK(token < uint64_t(vocab_), "{}: token {} at {} is outside the vocabulary of {}", (*file)->path, token,
              begin + i - (*file)->begin, vocab_);
        tokens[i] = static_cast<int32_t>(token);
    }
    return tokens;
}

}  // namespace train70b
