// Token shards in llm.c's .bin format, and masks.
// sources: data/source.cpp data/text_file.cpp core/files.cpp core/say.cpp
#include <cstring>

#include "01_single_gpu/complete/data/source.h"
#include "tests/fuzz/fuzz.h"

namespace train70b::fuzz {

namespace {
std::string int32(std::initializer_list<int64_t> values) {
    std::string bytes;
    for (const int64_t value : values) {
        const auto narrow = static_cast<uint32_t>(value);
        bytes.append(reinterpret_cast<const char*>(&narrow), 4);
    }
    return bytes;
}
std::string shard(int64_t magic, int64_t version, int64_t count, size_t token_bytes) {
    std::string bytes = int32({magic, version, count});
    bytes.resize(1024);
    for (size_t i = 0; i < token_bytes; ++i) bytes += char(i % 2 ? 0 : i % 200);
    return bytes;
}
}  // namespace

// The first byte says how the rest becomes files: one shard, two shards, a shard and its mask, a text; and the length
// of a sample.
Target target() {
    const auto read = [](const Folder& folder, std::string_view input) {
        if (input.empty()) return;
        const auto choice = static_cast<unsigned char>(input[0]);
        input.remove_prefix(1);
        std::filesystem::remove_all(folder.path() + "/data");
        std::filesystem::create_directories(folder.path() + "/data");
        const bool two = choice & 1, text = choice & 2, mask = choice & 32;
        const bool whole = mask && input.size() >= 2048;  // two headers: then 2 bytes per token, and 1
        const size_t cut = !two ? input.size() : whole ? 1024 + (input.size() - 2048) / 3 * 2 : input.size() / 2;
        folder.write(text ? "data/a.txt" : "data/a.bin", input.substr(0, cut));
        if (two) folder.write(mask ? "data/a.mask.bin" : "data/b.bin", input.substr(cut));
        const Source data(folder.path() + "/data", choice & 4 ? 300 : 60000, 1 + (choice >> 4), choice & 8 ? 0.3 : -1);
        for (int64_t i = 0; i < 2 * data.samples_per_epoch() && i < 50; ++i) data.window(1, i);
        for (int64_t i = 0; i < data.validation_samples() && i < 50; ++i) data.validation_window(i);
        data.read(0, data.tokens());
        if (data.has_masks()) data.read_mask(0, data.tokens());
    };
    std::vector<std::string> seeds;
    for (const char choice : {'\x00', '\x01', '\x04', '\x08', '\x32', '\x30'}) {
        const std::string narrow = shard(20240520, 1, 100, 200), wide = shard(20240801, 7, 50, 200);
        for (const std::string& one : {narrow, wide, shard(20240520, 1, -1, 0), shard(20240801, 7, INT32_MAX, 4)})
            seeds.push_back(std::string(1, choice) + (choice & 1 ? one + one : one));
    }
    std::string half = shard(20261122, 1, 100, 100);
    for (size_t i = 1024; i < half.size(); ++i) half[i] = char(i % 2);
    seeds.push_back("\x21" + shard(20240520, 1, 100, 200) + half);
    seeds.push_back("\x21" + shard(20240520, 1, 99, 198) + half);
    return {read,
            seeds,
            {int32({20240520}), int32({20240801}), int32({20261122}), int32({20261122, 1}), int32({1}), int32({7}),
             int32({20240520, 1}), int32({20240801, 7}), int32({-1}), int32({INT32_MAX}), int32({INT32_MIN})}};
}

}  // namespace train70b::fuzz
