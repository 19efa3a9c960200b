// Grades the lab lse-merge.
#include "tests/attention_error.h"
#include "tests/labs.h"
#include "tests/ranks.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr int64_t kRows = 6, kHeads = 3, kWidth = 5;

// Two sets and what they are together, in double.
struct Sets {
    std::vector<double> o1, l1, o2, l2, out, lse;

    // l1, l2: of (row, head) i.
    Sets(const std::function<double(int64_t)>& lse1, const std::function<double(int64_t)>& lse2)
        : o1(randoms(kRows * kHeads * kWidth, 1)), o2(randoms(kRows * kHeads * kWidth, 2)), out(o1) {
        for (int64_t i = 0; i < kRows * kHeads; ++i) {
            const double a = lse1(i), b = lse2(i), most = std::max(a, b);
            l1.push_back(a), l2.push_back(b);
            lse.push_back(most == -INFINITY ? most : most + std::log(std::exp(a - most) + std::exp(b - most)));
            for (int64_t d = 0; d < kWidth && most > -INFINITY; ++d) {
                const size_t at = size_t(i * kWidth + d);
                out[at] = o1[at] * std::exp(a - lse.back()) + o2[at] * std::exp(b - lse.back());
            }
        }
    }
    std::pair<std::vector<double>, std::vector<double>> merged() const {  // by the student
        Tensor x = tensor(o1, {kRows, kHeads * kWidth}), x_lse = tensor(l1, {kRows, kHeads});
        merge_attention(x, x_lse, tensor(o2, {kRows, kHeads * kWidth}), tensor(l2, {kRows, kHeads}));
        return {values(x), values(x_lse)};
    }
};

// The first element that is wrong: "row 0, head 1: -0.3, expected 0.2".
std::string first_wrong(const std::vector<double>& got, const std::vector<double>& expected, int64_t width,
                        double relative = 3e-6) {
    for (size_t i = 0; i < got.size(); ++i)
        if (got[i] != expected[i] && !(std::abs(got[i] - expected[i]) <= relative * (1 + std::abs(expected[i])))) {
            const int64_t pair = int64_t(i) / width;
            return fmt::format("row {}, head {}: {:.6g}, expected {:.6g}", pair / kHeads, pair % kHeads, got[i],
                               expected[i]);
        }
    return "";
}

double usual(int64_t i, int64_t key) { return 4 * randoms(kRows * kHeads, uint64_t(key))[size_t(i)]; }

const Sets& usual_sets() {
    static const Sets sets([](int64_t i) { return usual(i, 3); }, [](int64_t i) { return usual(i, 4); });
    return sets;
}

}  // namespace

TEST_CASE("lab: the output of two sets") {
    const std::string wrong = first_wrong(usual_sets().merged().first, usual_sets().out, kWidth);
    expect_none_wrong(wrong.empty() ? "" : "out, " + wrong);
}

TEST_CASE("lab: the lse of two sets") {
    const std::string wrong = first_wrong(usual_sets().merged().second, usual_sets().lse, 1);
    expect_none_wrong(wrong.empty() ? "" : "lse, " + wrong);
}

TEST_CASE("lab: large scores") {
    for (const double score : {1000.0, -1000.0}) {
        const Sets sets([=](int64_t) { return score; }, [=](int64_t) { return score; });
        const auto [out, lse] = sets.merged();
        figure(fmt::format("lse of two sets with {} each", score), lse[0], score + std::log(2), "", "l + log 2",
               std::isfinite(lse[0]) ? ""
                                     : "e^1000 is infinite in fp32, and e^-1000 is 0: take the larger of the two out "
                                       "of the logarithm.",
               1e-6);
        const std::string wrong = first_wrong(out, sets.out, kWidth, 1e-4);  // lse has 1000 in fp32's 24 bits
        expect_none_wrong(wrong.empty() ? "" : "out, " + wrong);
    }
}

TEST_CASE("lab: a set without keys") {
    struct Case {
        const char* what;
        double first, second;  // 0: some number
    };
    for (const Case& each :
         {Case{"the second set has no keys", 0, -INFINITY}, Case{"the first set has no keys", -INFINITY, 0},
          Case{"neither set has keys", -INFINITY, -INFINITY}}) {
        const Sets sets([&](int64_t i) { return each.first == 0 ? usual(i, 3) : each.first; },
                        [&](int64_t i) { return each.second == 0 ? usual(i, 4) : each.second; });
        const auto [out, lse] = sets.merged();
        const std::string wrong = first_wrong(out, sets.out, kWidth), wrong_lse = first_wrong(lse, sets.lse, 1);
        if (!wrong.empty()) expect_none_wrong(fmt::format("{}: out, {}", each.what, wrong));
        if (!wrong_lse.empty()) expect_none_wrong(fmt::format("{}: lse, {}", each.what, wrong_lse));
    }
}

TEST_CASE("lab: ring attention") {
    for (const char* algorithm : {"ring", "zigzag"})
        for (const float scale : {1.0f, 8.0f}) {
            const double error = attention_error(world(), {algorithm}, DType::f32, 1, scale);
            const double most = scale == 1.0f ? 2e-6 : 2e-4;  // scores of hundreds in fp32's 24 bits
            INFO(std::string(algorithm), " on ", world().size(), " ranks, scores of about ", scale * scale,
                 ": relative error of output and gradients ", error, " (rounding: at most ", most, ")");
            EXPECT_EVERYWHERE(error <= most);
        }
}
