#include "01_single_gpu/complete/data/mixture.h"

#include <cmath>
#include <filesystem>
#include <optional>

#include "01_single_gpu/core/number.h"
#include "01_single_gpu/core/random.h"
#include "01_single_gpu/core/registry.h"

namespace train70b {

namespace fs = std::filesystem;

namespace {
constexpr uint64_t kOne = uint64_t(1) << 32;

// Of slots 0 to n - 1, how many go to a source with this share: (n * share + phase) / 2^32, exact for any n.
int64_t taken(int64_t n, uint64_t share, uint64_t phase) {
    const uint64_t high = uint64_t(n) >> 32, low = uint64_t(n) & (kOne - 1);
    return int64_t(high * share + ((low * share + phase) >> 32));
}

constexpr uint64_t kPhases = 0x6d6978'70686173u, kOrders = 0x6d6978'6f726465u;  // keys of two families of numbers
}  // namespace

Mixture::Mixture(const std::vector<double>& weights) {
    double left = 0;
    for (auto weight = weights.rbegin(); weight != weights.rend(); ++weight) {
        CHECK(*weight >= 0 && std::isfinite(*weight), "a weight of {}", *weight);
        left += *weight;
        const double share = *weight > 0 ? *weight / left : 0;
        shares_.insert(shares_.begin(), static_cast<uint64_t>(std::llround(share * double(kOne))));
    }
    CHECK(left > 0, "weights sum to {}", left);
}

Mixture::Draw Mixture::slot(uint64_t seed, int64_t n) const {
    const uint64_t key = random_bits(seed, kPhases);
    for (size_t source = 0; source < shares_.size(); ++source) {
        const uint64_t phase = random_bits(key, source) & (kOne - 1);
        const int64_t before = taken(n, shares_[source], phase);
        if (taken(n + 1, shares_[source], phase) > before) return {int64_t(source), before};
        n -= before;
    }
    CHECK(false, "slot {} has no source", n);
    return {};
}

Mixture::Draw Mixture::draw(uint64_t seed, int64_t index) const {
    const int64_t block = index / kBlock, place = index % kBlock;
    const uint64_t key = random_bits(random_bits(seed, kOrders), uint64_t(block));
    const auto at = [&](int64_t i) { return slot(seed, block * kBlock + permute(i, kBlock, key)); };
    // The source's samples within the block, in the order of the run: the first of them has the smallest number.
    Draw own = at(place);
    int64_t first = own.sample, earlier = 0;
    for (int64_t i = 0; i < kBlock; ++i)
        if (const Draw other = at(i); other.source == own.source) {
            first = std::min(first, other.sample);
            earlier += i < place;
        }
    return {own.source, first + earlier};
}

// ---- the command line -----------------------------------------------------------------------------------------------

// What stands behind the last colon, as a number (or "nan"); empty if it is none.
static std::optional<double> weight_of(const std::string& part) {
    const size_t colon = part.rfind(':');
    return colon == part.npos ? std::nullopt : parse_number(part.substr(colon + 1));
}

std::vector<WeightedPath> parse_mixture(const std::string& data) {
    std::error_code error;
    const std::vector<std::string> parts = items_of(data);
    bool weighted = false;
    for (const std::string& part : parts) weighted = weighted || weight_of(part);
    if (!weighted || fs::exists(data, error)) return {{data, 1}};

    std::vector<WeightedPath> paths;
    double sum = 0;
    for (const std::string& part : parts) {
        const std::optional<double> weight = weight_of(part);
        if (!weight)
            usage_error("--data {}: \"{}\" has no weight (must be PATH:WEIGHT,PATH:WEIGHT,..., or one path)", data,
                        part);
        paths.push_back({part.substr(0, part.rfind(':')), *weight});
        if (paths.back().path.empty()) usage_error("--data {}: \"{}\" has no path (must be PATH:WEIGHT)", data, part);
        if (!(*weight >= 0) || !std::isfinite(*weight))
            usage_error("--data {}: the weight of {} is {} (must be at least 0)", data, paths.back().path, *weight);
        sum += *weight;
    }
    if (!(std::abs(sum - 1) <= 1e-6)) usage_error("--data {}: the weights sum to {} (must be 1)", data, sum);
    return paths;
}

std::vector<std::string> distinct_tails(const std::vector<std::string>& paths) {
    std::vector<std::vector<std::string>> components;
    for (const std::string& path : paths) {
        auto& list = components.emplace_back();
        for (const fs::path& part : fs::path(path).lexically_normal())
            if (!part.empty()) list.push_back(part.string());
    }
    const auto tail = [&](size_t path, size_t length) {
        const auto& list = components[path];
        fs::path joined;
        for (size_t i = list.size() - std::min(length, list.size()); i < list.size(); ++i) joined /= list[i];
        return joined.string();
    };
    std::vector<std::string> tails;
    for (size_t path = 0; path < paths.size(); ++path) {
        const auto is_taken = [&](size_t length) {
            for (size_t other = 0; other < paths.size(); ++other)
                if (other != path && tail(other, length) == tail(path, length)) return true;
            return false;
        };
        size_t length = 1;
        while (is_taken(length) && length < components[path].size()) ++length;
        tails.push_back(tail(path, length));
    }
    return tails;
}

}  // namespace train70b
