#include "01_single_gpu/complete/data/data.h"

#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <map>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/random.h"

namespace train70b {

namespace fs = std::filesystem;

EmptyText::EmptyText(int64_t bytes) {
    const std::string blanks(size_t(std::min<int64_t>(bytes, 1 << 16)), ' ');  // so much of a text is looked at
    if (!file_ || std::fputs(blanks.c_str(), file_.get()) < 0 || std::fflush(file_.get()) != 0 ||
        ::ftruncate(fileno(file_.get()), bytes) != 0)
        throw CommonError("no temporary file can be made, which a recording needs");
}

Dataset::Dataset(const std::string& data, int64_t vocab, int64_t seq_len, double val_fraction) : seq_len_(seq_len) {
    const std::vector<WeightedPath> weighted = parse_mixture(data);
    std::vector<std::string> paths;
    std::vector<double> weights;
    for (const auto& [path, weight] : weighted) {
        paths.push_back(path);
        weights.push_back(weight);
    }
    const std::vector<std::string> names = distinct_tails(paths);
    const auto open_files = std::make_shared<OpenFiles>();
    std::map<std::string, size_t> source_of;  // by the file that a path leads to
    for (size_t i = 0; i < paths.size(); ++i) {
        auto source = std::make_unique<Source>(paths[i], vocab, seq_len, weights[i] > 0 ? val_fraction : 1, open_files);
        for (const std::string& file : source->files()) {
            std::error_code error;
            const fs::path target = fs::canonical(file, error);
            const size_t other = source_of.emplace(error ? file : target.string(), i).first->second;
            if (other != i)
                usage_error("--data {}: {} and {} both have the file {} (each file must be in one source)", data,
                            paths[other], paths[i], file);
        }
        parts_.push_back({names[i], weights[i], std::move(source)});
    }
    mixture_ = std::make_unique<Mixture>(weights);
}

Sample Dataset::read(const Source& source, int64_t begin) const {
    Sample sample{source.read(begin, seq_len_ + 1), {}};
    sample.targets.assign(sample.tokens.begin() + 1, sample.tokens.end());
    if (!source.has_masks()) return sample;
    const std::vector<uint8_t> mask = source.read_mask(begin, seq_len_ + 1);
    for (size_t t = 0; t < sample.targets.size(); ++t)
        if (mask[t + 1] == 0) sample.targets[t] = -1;
    return sample;
}

Sample Dataset::sample(uint64_t seed, int64_t index) const {
    if (!is_mixture()) return read(*parts_[0].source, parts_[0].source->train_begin(seed, index));
    constexpr uint64_t kSources = 0x6d6978'73656564u;  // each source has an order of its own
    const Mixture::Draw draw = mixture_->draw(seed, index);
    const Source& source = *parts_[size_t(draw.source)].source;
    const uint64_t key = random_bits(random_bits(seed, kSources), uint64_t(draw.source));
    return read(source, source.train_begin(key, draw.sample));
}

std::vector<int32_t> Dataset::opening(int64_t count) const {
    const Source& source = *parts_[0].source;
    const int64_t begin = source.validation_samples() > 0 ? source.validation_begin(0) : 0;
    return source.read(begin, std::min(count, source.tokens() - begin));
}

std::vector<std::string> data_paths(const std::string& data) {
    std::vector<std::string> paths;
    std::error_code error;
    for (const auto& [path, weight] : parse_mixture(data)) {
        paths.push_back(path);
        if (path.ends_with(".bin") && fs::is_regular_file(path, error) && fs::exists(mask_path(path), error))
            paths.push_back(mask_path(path));
    }
    return paths;
}

std::vector<int32_t> document_starts(const std::vector<int32_t>& sample, int64_t seq_len, int64_t document_token) {
    std::vector<int32_t> starts;
    int32_t start = 0;
    for (int64_t t = 0; t < seq_len; ++t) {
        starts.push_back(start);
        if (sample[size_t(t)] == document_token) start = static_cast<int32_t>(t + 1);
    }
    return starts;
}

std::vector<int32_t> window_starts(const std::vector<int32_t>& document_starts, int64_t window) {
    std::vector<int32_t> starts;
    for (int64_t t = 0; const int32_t start : document_starts)
        starts.push_back(std::max(start, static_cast<int32_t>(++t - window)));
    return starts;
}

double document_pairs(const std::vector<int32_t>& starts) {
    double pairs = 0;
    for (size_t t = 0; t < starts.size(); ++t) pairs += double(t) - starts[t] + 1;
    return pairs;
}

}  // namespace train70b
