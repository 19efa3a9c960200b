#include "01_single_gpu/complete/data/text_file.h"

#include <algorithm>
#include <cstring>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/say.h"

namespace train70b {

using namespace std::string_view_literals;

namespace {
constexpr const char* kTokens = "docs/convert_tokens.py makes token shards of it";
constexpr const char* kTexts = "write its texts to .txt or .jsonl, for docs/make_shards.py";
constexpr const char* kPacked = "unpack it first";
constexpr const char* kModel = "a model: --load-hf takes its folder";
constexpr const char* kNoText = "leave it out";

struct Beginning {
    std::string_view bytes;
    const char *name, *advice;
};
const Beginning kBeginnings[] = {
    {"\x93NUMPY", "a NumPy array", kTokens},
    {"MMIDIDX\0\0"sv, "an index of Megatron", kTokens},
    {"PAR1", "a Parquet file", kTexts},
    {"ARROW1", "an Arrow file", kTexts},
    {"\xff\xff\xff\xff", "an Arrow stream", kTexts},
    {"ORC", "an ORC file", kTexts},
    {"Obj\x01", "an Avro file", kTexts},
    {"\x89HDF", "an HDF5 file", kTexts},
    {"SQLite format 3", "an SQLite database", kTexts},
    {"%PDF", "a PDF", "write its text to a .txt"},
    {"\x1f\x8b", "packed by gzip", kPacked},
    {"\x28\xb5\x2f\xfd", "packed by zstd", kPacked},
    {"\xfd\x37zXZ", "packed by xz", kPacked},
    {"BZh", "packed by bzip2", kPacked},
    {"\x04\x22\x4d\x18", "packed by lz4", kPacked},
    {"7z\xbc\xaf", "a 7z archive", kPacked},
    {"PK\x03\x04", "a zip archive, as .npz, .docx and PyTorch's files are", kPacked},
    {"GGUF", "a GGUF model", kModel},
    {"\x80\x02", "a Python pickle", kNoText},
    {"\x80\x04", "a Python pickle", kNoText},
    {"\x80\x05", "a Python pickle", kNoText},
    {"\x89PNG", "a picture", kNoText},
    {"\xff\xd8\xff", "a picture", kNoText},
    {"\x7f"
     "ELF",
     "a program", kNoText},
    {"\xff\xfe", "UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"},
    {"\xfe\xff", "UTF-16", "convert it: iconv -f UTF-16 -t UTF-8"},
};
}  // namespace

std::string known_format(std::string_view first_bytes) {
    for (const auto& [bytes, name, advice] : kBeginnings)
        if (first_bytes.starts_with(bytes)) return fmt::format("{} ({})", name, advice);
    uint64_t header = 0;  // of safetensors: its length, and JSON
    if (first_bytes.size() > sizeof header && first_bytes[sizeof header] == '{') {
        std::memcpy(&header, first_bytes.data(), sizeof header);
        if (header < (uint64_t(1) << 32)) return fmt::format("a safetensors file ({})", kModel);
    }
    return "";
}

double share_not_utf8(std::string_view text) {
    constexpr size_t kLongest = 4;  // bytes of a character
    size_t bad = 0;
    for (size_t i = 0; i < text.size();) {
        const bool control = static_cast<unsigned char>(text[i]) < 0x20 && text[i] != '\0';
        const size_t length = control ? 1 : utf8_length(text.substr(i));
        if (length == 0 && text.size() - i >= kLongest) ++bad;
        i += std::max<size_t>(length, 1);
    }
    return text.empty() ? 0 : double(bad) / double(text.size());
}

void check_text(const InputFile& file, const std::string& path) {
    std::string text(size_t(std::min<int64_t>(file.bytes(), 64 << 10)), '\0');
    file.read(0, text.data(), int64_t(text.size()));
    const std::string other = known_format(text);
    if (!other.empty())
        usage_error("--data {}: is {}; must be a text file, a folder of text, or .bin token shards", path, other);
    const double share = share_not_utf8(text);
    if (share > 0)
        say("data: {}: {:.1f}% of its first {} bytes are not UTF-8, and are trained on as they are\n", path,
            share * 100, text.size());
}

}  // namespace train70b
