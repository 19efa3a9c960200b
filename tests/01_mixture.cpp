// Mixtures: from which source each sample comes, how --data is read, and several sources as one stream.
#include <array>
#include <cmath>
#include <map>
#include <set>

#include "01_single_gpu/complete/data/data.h"
#include "tests/files.h"
#include "tests/shards.h"
#include "tests/support.h"

using namespace train70b;
using namespace train70b::test;

namespace {

const std::vector<std::vector<double>> kMixtures = {{0.7, 0.3},
                                                    {0.5, 0.5},
                                                    {0.001, 0.999},
                                                    {0.2, 0.0, 0.3, 0.5, 0.0},
                                                    {1, 0},
                                                    {0, 1},
                                                    std::vector<double>(10, 0.1),
                                                    {1 / 3.0, 1 / 3.0, 1 / 3.0},
                                                    {0.9, 0.05, 0.025, 0.0125, 0.0125}};

std::vector<WeightedPath> parsed(const std::string& text) { return parse_mixture(text); }

// A text of `count` times the same character, or a shard of counting tokens.
std::string text_of(const Folder& folder, const std::string& name, char letter, int64_t count) {
    std::filesystem::create_directories(std::filesystem::path(folder / name).parent_path());
    write_text(folder / name, std::string(size_t(count), letter));
    return folder / name;
}

}  // namespace

TEST_CASE("a source's samples are drawn one after another: the k-th index that draws it is its sample k") {
    for (const auto& weights : kMixtures)
        for (const uint64_t seed : {1, 2}) {
            const Mixture mixture(weights);
            std::vector<int64_t> drawn(weights.size());
            for (int64_t i = 0; i < 5000; ++i) {
                const Mixture::Draw draw = mixture.draw(seed, i);
                REQUIRE(weights[size_t(draw.source)] > 0);
                REQUIRE(draw.sample == drawn[size_t(draw.source)]++);
            }
        }
}

TEST_CASE("weights: every window of 1,024 samples or more holds them to within a standard error, anywhere in a run") {
    for (const auto& weights : kMixtures)
        for (const uint64_t seed : {1, 2, 3})
            for (const int64_t start : {int64_t(0), int64_t(1) << 40}) {
                const Mixture mixture(weights);
                constexpr int64_t kTotal = 6000;
                std::vector<std::vector<int64_t>> before(kTotal + 1, std::vector<int64_t>(weights.size()));
                for (int64_t i = 0; i < kTotal; ++i) {
                    before[size_t(i) + 1] = before[size_t(i)];
                    ++before[size_t(i) + 1][size_t(mixture.draw(seed, start + i).source)];
                }
                double worst = 0;  // of the deviations, in standard errors, the rounding to whole samples aside
                for (int64_t begin = 0; begin < kTotal; begin += 7)
                    for (const int64_t length : {1024, 1500, 2048, 4099})
                        for (size_t s = 0; begin + length <= kTotal && s < weights.size(); ++s) {
                            const double n = double(length), w = weights[s];
                            const double count = double(before[size_t(begin + length)][s] - before[size_t(begin)][s]);
                            const double error = std::sqrt(n * w * (1 - w));
                            worst = std::max(worst, (std::abs(count - n * w) - 2) / std::max(error, 1e-9));
                        }
                INFO("seed ", seed, ", from ", start, ", ", weights.size(), " sources, the first of ", weights[0]);
                EXPECT(worst <= 1);
            }
}

TEST_CASE("the whole run: after any number of blocks no source is more than two samples from its share") {
    for (const auto& weights : kMixtures) {
        const Mixture mixture(weights);
        for (const int64_t blocks : {1, 10, 1000, 100000, 10000000}) {
            std::map<int64_t, int64_t> next;  // the number of a source's first sample behind them
            for (int64_t i = blocks * Mixture::kBlock; i < (blocks + 200) * Mixture::kBlock; ++i) {
                const Mixture::Draw draw = mixture.draw(5, i);
                next.emplace(draw.source, draw.sample);
            }
            for (const auto& [source, count] : next)  // shares are rounded to 2^-33
                EXPECT(std::abs(double(count) - double(blocks * Mixture::kBlock) * weights[size_t(source)]) <=
                       2 + double(blocks * Mixture::kBlock) * 0x1p-31);
        }
    }
}

TEST_CASE("sources do not follow the rhythm of data-parallel ranks") {
    const Mixture mixture({0.5, 0.5});
    for (const int64_t ranks : {2, 4, 8, 64}) {
        std::vector<std::array<int64_t, 2>> of_rank(static_cast<size_t>(ranks));
        for (int64_t i = 0; i < 400 * ranks; ++i) ++of_rank[size_t(i % ranks)][size_t(mixture.draw(1, i).source)];
        for (const auto& counts : of_rank) EXPECT(std::abs(double(counts[0]) - 200) <= 5 * 10);  // 10: a standard error
    }
}

TEST_CASE("seeds have orders of their own, of the same proportions") {
    const Mixture mixture({0.6, 0.4});
    std::set<std::vector<int64_t>> orders;
    for (uint64_t seed = 0; seed < 20; ++seed) {
        std::vector<int64_t> order;
        for (int64_t i = 0; i < 128; ++i) order.push_back(mixture.draw(seed, i).source);
        orders.insert(order);
    }
    EXPECT(orders.size() == 20);
    EXPECT(mixture.draw(~uint64_t(0), int64_t(1) << 55) == Mixture({0.6, 0.4}).draw(~uint64_t(0), int64_t(1) << 55));
}

TEST_CASE("--data: one path, or paths with weights") {
    const Folder folder;
    const std::string a = text_of(folder, "a.txt", 'a', 100), odd = text_of(folder, "b:0.5,c:0.5", 'b', 100);
    EXPECT(parsed(a).size() == 1);
    EXPECT(parsed(odd).at(0).path == odd);  // it exists
    EXPECT(parsed(odd).size() == 1);
    EXPECT(parsed("x,y").at(0).path == "x,y");
    EXPECT(parsed("C:\\data").at(0).path == "C:\\data");
    const auto two = parsed("x:y:0.25,z:0.75");
    REQUIRE(two.size() == 2);
    EXPECT(two[0].path == "x:y");
    EXPECT(two[0].weight == 0.25);
    EXPECT(two[1].path == "z");
    EXPECT(parsed("x:0.3333333,y:0.3333333,z:0.3333333").size() == 3);
    EXPECT(parsed("x:1,y:0").at(1).weight == 0);
    EXPECT_USAGE_ERROR(parsed("x:0.7,y:0.2"), "the weights sum to 0.9 (must be 1)");
    EXPECT_USAGE_ERROR(parsed("x:0.99999"), "the weights sum to 0.99999 (must be 1)");
    EXPECT_USAGE_ERROR(parsed("x:1.5,y:-0.5"), "the weight of y is -0.5 (must be at least 0)");
    EXPECT_USAGE_ERROR(parsed("x:nan,y:0.5"), "the weight of x is nan");
    EXPECT_USAGE_ERROR(parsed("x:inf,y:0.5"), "the weight of x is inf");
    EXPECT_USAGE_ERROR(parsed("x:0.5,y"), "\"y\" has no weight");
    EXPECT_USAGE_ERROR(parsed("x:0.5,"), "\"\" has no weight");
    EXPECT_USAGE_ERROR(parsed("x:0.5,y:0.5x"), "\"y:0.5x\" has no weight");
    EXPECT_USAGE_ERROR(parsed(":0.5,y:0.5"), "\":0.5\" has no path");
}

TEST_CASE("names: the shortest ends of the paths that differ") {
    using Names = std::vector<std::string>;
    EXPECT(distinct_tails({"/x/a.txt"}) == Names{"a.txt"});
    EXPECT(distinct_tails({"/x/a.txt", "/y/b.txt"}) == Names{"a.txt", "b.txt"});
    EXPECT(distinct_tails({"/x/a/train.bin", "/x/b/train.bin", "web"}) == Names{"a/train.bin", "b/train.bin", "web"});
    EXPECT(distinct_tails({"a/b/", "c/b"}) == Names{"a/b", "c/b"});
    EXPECT(distinct_tails({"t", "a/t"}) == Names{"t", "a/t"});
    EXPECT(distinct_tails({"/1/a/t", "/2/a/t"}) == Names{"1/a/t", "2/a/t"});
}

TEST_CASE("one source with masks makes a mixture with masks, wherever it stands") {
    const Folder folder;
    write_shard(folder / "plain.bin", random_tokens(300, 1));
    write_shard(folder / "masked.bin", random_tokens(300, 2), random_mask(300, 2));
    const std::string plain = folder / "plain.bin", masked = folder / "masked.bin";
    EXPECT(Dataset(fmt::format("{}:0.5,{}:0.5", plain, masked), 256, 16, 0).has_masks());
    EXPECT(Dataset(fmt::format("{}:0.5,{}:0.5", masked, plain), 256, 16, 0).has_masks());
    EXPECT(!Dataset(plain, 256, 16, 0).has_masks());
}

TEST_CASE("several sources as one stream; one of weight 0 is held out wholly") {
    const Folder folder;
    const std::string a = text_of(folder, "a.txt", 'a', 1000), b = text_of(folder, "b.txt", 'b', 500),
                      c = text_of(folder, "c.txt", 'c', 100);
    const Dataset data(fmt::format("{}:0.75,{}:0.25,{}:0", a, b, c), 256, 16, -1);
    REQUIRE(data.is_mixture());
    REQUIRE(data.parts().size() == 3);
    EXPECT(data.parts()[0].name == "a.txt");
    EXPECT(data.train_tokens() == 900 + 450);
    EXPECT(data.parts()[0].source->validation_samples() == 6);
    EXPECT(data.parts()[1].source->validation_samples() == 3);
    EXPECT(data.parts()[2].source->validation_samples() == 6);  // of all of its 99 targets
    EXPECT(data.validation_samples() == 15);
    EXPECT(data.validation_sample(2, 5).tokens == std::vector<int32_t>(17, 'c'));
    EXPECT_CHECK_FAILS(data.parts()[2].source->window(1, 0));
    std::map<int32_t, int64_t> counts;
    for (int64_t i = 0; i < 640; ++i) ++counts[data.sample(1, i).tokens[0]];
    EXPECT(std::abs(counts['a'] - 480) <= 2);
    EXPECT(counts['a'] + counts['b'] == 640);

    // Each source has its own order, and an epoch of it visits all its windows.
    const Dataset one(a, 256, 16, -1);
    EXPECT(!one.is_mixture());
    for (int64_t i = 0; i < 100; ++i) EXPECT(one.sample(1, i).tokens == one.parts()[0].source->window(1, i));
    EXPECT_USAGE_ERROR(Dataset(fmt::format("{0}:0.5,{0}:0.5", a), 256, 16, -1), "each file must be in one source");
    EXPECT_USAGE_ERROR(Dataset(fmt::format("{}:0.5,{}:0.5", a, folder.text()), 256, 16, -1), "both have the file");
    EXPECT_USAGE_ERROR(Dataset(fmt::format("{}:0.5,{}:0.5", a, folder / "no.txt"), 256, 16, -1),
                       "no.txt: cannot be read");
    EXPECT_USAGE_ERROR(Dataset(fmt::format("{}:1,{}:0", a, c), 256, 100, -1), "c.txt: 100 tokens");
}
