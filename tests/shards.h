#pragma once
// Token shards and masks for tests.
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "01_single_gpu/complete/data/source.h"
#include "01_single_gpu/core/random.h"
#include "tests/files.h"

namespace train70b::test {

inline std::string shard_header(int32_t magic, int32_t version, size_t count) {
    std::vector<int32_t> fields = {magic, version, int32_t(count)};
    fields.resize(256);
    return std::string(reinterpret_cast<const char*>(fields.data()), fields.size() * sizeof(int32_t));
}

// A shard of uint16 tokens and, unless it is empty, its mask.
inline void write_shard(const std::string& path, const std::vector<int32_t>& tokens,
                        const std::vector<uint8_t>& mask = {}) {
    const std::vector<uint16_t> narrow(tokens.begin(), tokens.end());
    write_text(path, shard_header(20240520, 1, tokens.size()) +
                         std::string(reinterpret_cast<const char*>(narrow.data()), 2 * narrow.size()));
    if (!mask.empty())
        write_text(mask_path(path), shard_header(20261122, 1, mask.size()) + std::string(mask.begin(), mask.end()));
}

// Tokens below 128; each place is a target in half of the cases, in runs of up to 16.
inline std::vector<int32_t> random_tokens(int64_t count, uint64_t key) {
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = int32_t(random_bits(key, i) % 128);
    return tokens;
}
inline std::vector<uint8_t> random_mask(int64_t count, uint64_t key) {
    std::vector<uint8_t> mask(static_cast<size_t>(count));
    for (size_t i = 0; i < mask.size(); ++i) mask[i] = random_bits(key, i / (1 + random_bits(key, ~i / 64) % 16)) % 2;
    return mask;
}

}  // namespace train70b::test
