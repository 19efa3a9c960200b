#pragma once
// Texts, shards and masks in a folder, and what is said of wrong ones.
#include <filesystem>
#include <fstream>
#include <numeric>

#include "01_single_gpu/complete/data/source.h"
#include "tests/support.h"

namespace train70b::test {

namespace fs = std::filesystem;

constexpr int32_t kMagic16 = 20240520, kMagic32 = 20240801;  // llm.c: version 1 and version 7
constexpr int64_t kSeq = 16;

// A fresh folder, gone at the end of the test.
struct DataFolder {
    fs::path path;

    DataFolder() {
        std::string pattern = (fs::temp_directory_path() / "train70b_data_XXXXXX").string();
        REQUIRE(mkdtemp(pattern.data()) != nullptr);
        path = pattern;
    }
    ~DataFolder() { fs::remove_all(path); }
    std::string write(const std::string& name, const std::string& content) const {
        fs::create_directories((path / name).parent_path());
        std::ofstream(path / name, std::ios::binary) << content;
        return (path / name).string();
    }
};

// A shard of llm.c: 256 int32 of header, then tokens of type T. count < -1 means: the true one.
template <class T>
inline std::string shard(const std::vector<int32_t>& tokens, int32_t magic = sizeof(T) == 2 ? kMagic16 : kMagic32,
                         int32_t count = -2) {
    const int32_t version = sizeof(T) == 2 ? 1 : 7;
    std::vector<int32_t> header = {magic, version, count < -1 ? int32_t(tokens.size()) : count};
    header.resize(256);
    const std::vector<T> body(tokens.begin(), tokens.end());
    return std::string(reinterpret_cast<const char*>(header.data()), 1024) +
           std::string(reinterpret_cast<const char*>(body.data()), body.size() * sizeof(T));
}

// The mask of a shard: a header like the shard's, then one byte per token.
inline std::string mask(const std::vector<int32_t>& bytes, int32_t magic = 20261122, int32_t version = 1) {
    std::vector<int32_t> header = {magic, version, int32_t(bytes.size())};
    header.resize(256);
    return std::string(reinterpret_cast<const char*>(header.data()), 1024) + std::string(bytes.begin(), bytes.end());
}

inline std::vector<int32_t> counting(int64_t begin, int64_t count) {
    std::vector<int32_t> numbers(count);
    std::iota(numbers.begin(), numbers.end(), int32_t(begin));
    return numbers;
}

inline std::vector<int32_t> bytes_of(const std::string& text) {
    std::vector<int32_t> tokens;
    for (char c : text) tokens.push_back(static_cast<unsigned char>(c));
    return tokens;
}

// Where the samples of one epoch begin, in their order.
inline std::vector<int64_t> begins(const Source& data, uint64_t seed, int64_t epoch) {
    std::vector<int64_t> list;
    for (int64_t i = 0; i < data.samples_per_epoch(); ++i)
        list.push_back(data.window(seed, epoch * data.samples_per_epoch() + i)[0]);
    return list;
}

// The line with which a source is refused; empty if it is not.
inline std::string refusal(const std::string& path, int64_t vocab = 256, int64_t seq_len = kSeq) {
    try {
        Source data(path, vocab, seq_len, -1);
    } catch (const UsageError& error) { return error.what(); }
    return "";
}

// One line that names the file and says what would work.
inline void expect_refusal(const std::string& line, const std::string& file, const std::string& hint) {
    INFO("refusal: " << line);
    EXPECT(line.find("--data " + file + ":") == 0);
    EXPECT(line.find(hint) != std::string::npos);
    EXPECT(line.find('\n') == std::string::npos);
}

}  // namespace train70b::test
