#include "01_single_gpu/complete/data/source.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "01_single_gpu/complete/data/text_file.h"
#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/random.h"

namespace train70b {

namespace fs = std::filesystem;

namespace {
constexpr const char* kShardEnd = ".bin";
constexpr const char* kMaskEnd = ".mask.bin";
constexpr const char* kAdvice = "must be a text file, a folder of text, or .bin token shards";
constexpr const char* kMaskAdvice = "must be the mask of its shard; without a mask, no file of this name";

struct Format {
    int32_t magic, version;
    int width;  // bytes per token
    const char* what;
};
const std::vector<Format> kShards = {{20240520, 1, 2, "uint16"},  // llm.c: GPT-2's and Llama-3's token files
                                     {20240801, 7, 4, "uint32 tokens"}};
const std::vector<Format> kMasks = {{20261122, 1, 1, "a mask"}};
constexpr int64_t kHeader = 256 * sizeof(int32_t);
}  // namespace

std::string mask_path(const std::string& shard) {
    return shard.substr(0, shard.size() - std::strlen(kShardEnd)) + kMaskEnd;
}

// ---- open files -----------------------------------------------------------------------------------------------------

OpenFiles::OpenFiles() {
    struct rlimit limit {};
    const bool known = ::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    most_ = std::clamp<size_t>(known ? size_t(limit.rlim_cur) / 4 : 1024, 1, 1024);
}

std::shared_ptr<const InputFile> OpenFiles::get(const std::string& path, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (const auto found = files_.find(path); found != files_.end()) return found->second;
    const std::string name = "--data " + path;
    std::shared_ptr<const InputFile> file;
    try {
        file = std::make_shared<InputFile>(name, path, kAdvice);
    } catch (const UsageError&) {  // it could be read when the run began
        std::error_code error;
        throw std::runtime_error(fmt::format("{}: {} while it was in use", name,
                                             fs::exists(path, error) ? "has become unreadable" : "has vanished"));
    }
    if (file->bytes() != bytes)
        throw std::runtime_error(
            fmt::format("{}: has become {} while it was in use", name, file->bytes() < bytes ? "shorter" : "longer"));
    if (files_.size() >= most_) files_.clear();
    return files_[path] = file;
}

// ---- files ----------------------------------------------------------------------------------------------------------

// A contiguous range of the data's tokens, or the mask of one.
struct Source::File {
    std::string path;
    int64_t bytes = 0, header = 0;
    int64_t begin = 0, count = 0;  // index of the first token, number of tokens
    int width = 1;                 // bytes per token
    std::unique_ptr<File> mask;

    File(const std::string& path, const std::vector<Format>& formats) : path(path) {  // no formats: a text
        const InputFile file("--data " + path, path, &formats == &kMasks ? kMaskAdvice : kAdvice);
        count = bytes = file.bytes();
        if (formats.empty())
            check_text(file, path);
        else
            read_header(file, formats);
    }

    void read_header(const InputFile& file, const std::vector<Format>& formats) {
        int32_t fields[kHeader / sizeof(int32_t)] = {};
        header = kHeader;
        if (bytes < header)
            usage_error("--data {}: truncated: {} bytes, but a .bin shard begins with a header of {} bytes", path,
                        bytes, header);
        file.read(0, fields, header);
        std::string all;
        for (const Format& f : formats) all += fmt::format("{}{} for {}", all.empty() ? "" : " or ", f.magic, f.what);
        const auto format =
            std::find_if(formats.begin(), formats.end(), [&](const Format& f) { return f.magic == fields[0]; });
        if (format == formats.end())
            usage_error("--data {}: magic number {} (must be {}; docs/convert_tokens.py converts other token files)",
                        path, fields[0], all);
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

    // Tokens [from, from + number) of this file.
    std::vector<uint32_t> read(OpenFiles& open_files, int64_t from, int64_t number) const {
        std::vector<unsigned char> raw(size_t(number * width));
        open_files.get(path, bytes)->read(header + from * width, raw.data(), number * width);
        std::vector<uint32_t> tokens(raw.begin(), raw.begin() + (width == 1 ? number : 0));
        tokens.resize(size_t(number));
        for (int64_t i = 0; width == 2 && i < number; ++i) {
            uint16_t narrow;
            std::memcpy(&narrow, &raw[size_t(2 * i)], 2);
            tokens[size_t(i)] = narrow;
        }
        if (width == 4 && number > 0) std::memcpy(tokens.data(), raw.data(), size_t(4 * number));
        return tokens;
    }
};

Source::~Source() = default;

Source::Source(const std::string& path, int64_t vocab, int64_t seq_len, double val_fraction,
               std::shared_ptr<OpenFiles> open_files)
    : path(path), open_files_(std::move(open_files)), vocab_(vocab), seq_len_(seq_len) {
    std::vector<std::string> texts, shards, masks;
    list_files(texts, shards, masks);
    is_text_ = shards.empty() && masks.empty();  // a folder with any .bin file is a folder of shards
    for (const std::string& name : is_text_ ? texts : shards) {
        File& file = *files_.emplace_back(std::make_unique<File>(name, is_text_ ? std::vector<Format>() : kShards));
        file.begin = total_;
        total_ += file.count;
    }
    add_masks(masks);
    scan();
    const int64_t need = seq_len + 1;
    if (total_ < 2) usage_error("--data {}: {} tokens, but at least --seq-len + 1 = {} are needed", path, total_, need);
    if (total_ < need)
        usage_error("--data {}: {} tokens, but at least --seq-len + 1 = {} are needed (try --seq-len {})", path, total_,
                    need, total_ - 1);
    if (val_fraction >= 1) return;  // train_ and windows_ are 0
    const double fraction = val_fraction >= 0 ? val_fraction : (is_text_ ? 0.1 : 0.0);
    const int64_t validation = static_cast<int64_t>(fraction * double(total_));
    train_ = validation >= need && total_ - validation >= need ? total_ - validation : total_;
    windows_ = std::max<int64_t>(1, (train_ - 1) / seq_len - 1);  // one window is reserved for the alignment
}

// Each in the order of the names. What is no file or leads nowhere is listed too: it is refused where it is opened.
void Source::list_files(std::vector<std::string>& texts, std::vector<std::string>& shards,
                        std::vector<std::string>& masks) const {
    const auto take = [&](const fs::path& file) {
        auto& list = file.string().ends_with(kMaskEnd) ? masks : file.extension() == kShardEnd ? shards : texts;
        list.push_back(file.string());
    };
    std::error_code error;
    if (fs::is_directory(path, error)) {
        for (auto it = fs::recursive_directory_iterator(path, error);
             !error && it != fs::recursive_directory_iterator(); it.increment(error)) {
            std::error_code unknown;  // a link that leads nowhere, for one
            const std::string name = it->path().filename().string();
            if (name.starts_with("."))
                it.disable_recursion_pending();
            else if (!it->is_directory(unknown) || name.ends_with(kMaskEnd))
                take(it->path());
            else if (it->is_symlink(unknown))
                usage_error("--data {}: is a link to a folder (link its files, or name it as a source of its own)",
                            it->path().string());
        }
        if (error) usage_error("--data {}: cannot be read: {} (must be a folder of text)", path, error.message());
        if (texts.empty() && shards.empty() && masks.empty())
            usage_error("--data {}: the folder has no files (must contain text files or .bin token shards)", path);
    } else {
        take(path);
        for (const std::string& shard : shards)
            if (fs::exists(fs::symlink_status(mask_path(shard), error))) masks.push_back(mask_path(shard));
    }
    for (auto* list : {&texts, &shards, &masks}) std::sort(list->begin(), list->end());
}

// Every shard has a mask or none has: a mask that was forgotten would train on what it ignores.
void Source::add_masks(const std::vector<std::string>& masks) {
    has_masks_ = !masks.empty();
    if (!has_masks_) return;
    std::unordered_map<std::string, File*> shards;  // by the name of their masks
    for (const auto& file : files_) shards[mask_path(file->path)] = file.get();
    for (const std::string& name : masks) {
        const auto shard = shards.find(name);
        if (shard == shards.end())
            usage_error("--data {}: is a mask, but {}{} is not there (name the shard or its folder)", name,
                        name.substr(0, name.size() - std::strlen(kMaskEnd)), kShardEnd);
        File& file = *shard->second;
        file.mask = std::make_unique<File>(name, kMasks);
        if (file.mask->count != file.count)
            usage_error("--data {}: a mask of {} tokens, but {} has {} (must be as many)", name, file.mask->count,
                        file.path, file.count);
        shards.erase(shard);
    }
    if (!shards.empty())
        usage_error("--data {}: has no mask {}, but other shards of {} have one (must be all or none)",
                    shards.begin()->second->path, shards.begin()->first, path);
}

// What lies behind the first kScan tokens is checked when it is read.
void Source::scan() const {
    constexpr int64_t kScan = 1 << 28, kPiece = 1 << 20;
    int64_t scanned = 0;
    for (const auto& entry : files_) {
        const File& file = *entry;
        const bool any_fits = vocab_ > (int64_t(1) << (8 * file.width)) - 1;
        if (any_fits && !file.mask) continue;
        for (int64_t i = 0; i < file.count && scanned < kScan; i += kPiece) {
            const int64_t count = std::min(kPiece, file.count - i);
            scanned += count;
            const std::vector<uint32_t> tokens = any_fits ? std::vector<uint32_t>() : file.read(*open_files_, i, count);
            for (size_t t = 0; t < tokens.size(); ++t)
                if (tokens[t] >= uint64_t(vocab_))
                    usage_error(
                        "--data {}: token {} at position {} is outside the vocabulary of {} (try --vocab {} or "
                        "more; with --load-hf: tokens of that model)",
                        file.path, tokens[t], i + int64_t(t), vocab_,
                        uint64_t(*std::max_element(tokens.begin(), tokens.end())) + 1);
            if (!file.mask) continue;
            const std::vector<uint32_t> mask = file.mask->read(*open_files_, i, count);
            for (size_t t = 0; t < mask.size(); ++t)
                if (mask[t] > 1)
                    usage_error("--data {}: {} at position {} (must be 0 or 1)", file.mask->path, mask[t],
                                i + int64_t(t));
        }
    }
}

std::vector<std::string> Source::files() const {
    std::vector<std::string> names;
    for (const auto& file : files_) names.push_back(file->path);
    return names;
}

// ---- samples --------------------------------------------------------------------------------------------------------

int64_t Source::train_begin(uint64_t seed, int64_t index) const {
    CHECK(windows_ > 0, "{} is held out", path);
    const int64_t epoch = index / windows_, slack = train_ - 1 - windows_ * seq_len_;
    const uint64_t key = random_bits(seed, epoch);
    const int64_t alignment = static_cast<int64_t>(random_bits(key, 0) % uint64_t(slack + 1));
    return alignment + permute(index % windows_, windows_, key) * seq_len_;
}

template <class T>
std::vector<T> Source::read_files(int64_t begin, int64_t count, bool masks) const {
    CHECK(begin >= 0 && begin + count <= total_, "tokens [{}, {}) of {}", begin, begin + count, total_);
    std::vector<T> all;
    all.reserve(size_t(count));
    auto next = std::upper_bound(files_.begin(), files_.end(), begin,
                                 [](int64_t at, const std::unique_ptr<File>& f) { return at < f->begin + f->count; });
    while (int64_t(all.size()) < count) {
        const File& tokens = **next++;
        const File& file = masks ? *tokens.mask : tokens;
        const int64_t from = begin + int64_t(all.size()) - tokens.begin;
        const int64_t number = std::min(tokens.count - from, count - int64_t(all.size()));
        if (number == 0) continue;
        for (const uint32_t value : file.read(*open_files_, from, number)) {
            const int64_t position = begin + int64_t(all.size()) - tokens.begin;
            if (masks ? value > 1 : value >= uint64_t(vocab_))
                throw std::runtime_error(
                    masks ? fmt::format("--data {}: {} at position {} (must be 0 or 1)", file.path, value, position)
                          : fmt::format("--data {}: token {} at position {} is outside the vocabulary of {}", file.path,
                                        value, position, vocab_));
            all.push_back(static_cast<T>(value));
        }
    }
    return all;
}

std::vector<int32_t> Source::read(int64_t begin, int64_t count) const {
    return read_files<int32_t>(begin, count, false);
}

std::vector<uint8_t> Source::read_mask(int64_t begin, int64_t count) const {
    CHECK(has_masks_, "{} has no masks", path);
    return read_files<uint8_t>(begin, count, true);
}

}  // namespace train70b
