// Grades the lab top-k-capacity.
#include "01_single_gpu/ops/routing.h"
#include "tests/labs.h"

using namespace train70b;
using namespace train70b::test;

namespace {

using Ints = std::vector<int64_t>;

std::string text_of(const Ints& list) {
    std::string text;
    for (const int64_t each : list) text += fmt::format("{}{}", text.empty() ? "" : " ", each);
    return text;
}
Ints ints(const Tensor& x) {
    Ints list;
    for (const double each : values(x)) list.push_back(int64_t(each));
    return list;
}
Tensor indices(const std::vector<int32_t>& list, const Shape& shape) { return upload(list, shape, Device::cpu); }
std::string differs(const std::string& what, const Ints& got, const Ints& expected) {
    return got == expected ? "" : fmt::format("{}: {}, expected {}", what, text_of(got), text_of(expected));
}

Ints choose(const std::vector<double>& logits, int64_t top_k) {
    Tensor chosen({1, top_k}, DType::i32, Device::cpu);
    choose_experts(chosen, tensor(logits, {1, int64_t(logits.size())}), {},
                   {.experts = int64_t(logits.size()), .top_k = top_k});
    return ints(chosen);
}

// What the student's body gives, or why it has no meaning.
struct Kept {
    Ints begin, keep;  // (P, N)
    std::string wrong;

    Kept(const PieceCounts& mine, const PieceCounts& all, double factor, int64_t slots) {
        const std::vector<int32_t> list = begin_keep_of(mine, all, factor, slots);
        const size_t size = mine.counts.size();
        if (list.size() != 2 * size) wrong = fmt::format("{} numbers, expected 2 P N = {}", list.size(), 2 * size);
        if (!wrong.empty()) return;
        begin.assign(list.begin(), list.begin() + int64_t(size));
        keep.assign(list.begin() + int64_t(size), list.end());
    }
};

}  // namespace

TEST_CASE("lab: the k largest scores") {
    const std::vector<double> logits = {0.5, -1, 2, 1.5, -3, 0};
    for (const auto& [top_k, expected] :
         std::vector<std::pair<int64_t, Ints>>{{1, {2}}, {2, {2, 3}}, {4, {2, 3, 0, 5}}, {6, {2, 3, 0, 5, 1, 4}}})
        if (const std::string wrong =
                differs(fmt::format("the {} largest of 0.5 -1 2 1.5 -3 0", top_k), choose(logits, top_k), expected);
            !wrong.empty())
            return expect_none_wrong(wrong);
    expect_none_wrong("");
}

TEST_CASE("lab: equal scores") {
    std::string wrong = differs("the 2 largest of eight equal scores", choose(std::vector<double>(8, 1.0), 2), {0, 1});
    if (wrong.empty()) wrong = differs("the 3 largest of 1 2 1 2 1 1", choose({1, 2, 1, 2, 1, 1}, 3), {1, 3, 0});
    // More than a sort that is stable only for a few elements by chance.
    std::vector<double> many(200, 0.0);
    many[150] = 1;
    if (wrong.empty()) wrong = differs("the 3 largest of 199 zeros, and 1 at 150", choose(many, 3), {150, 0, 1});
    expect_none_wrong(wrong);
}

TEST_CASE("lab: slots that an expert keeps") {
    // 10 tokens, k = 2, N = 8: all have chosen expert 3, and a second one.
    const PieceCounts counts{{{0, 0}}, {4, 1, 1, 10, 1, 1, 1, 1}};
    for (const double factor : {1.25, 2.0, 0.1}) {
        const Kept kept(counts, counts, factor, 20);
        if (!kept.wrong.empty()) return expect_none_wrong(kept.wrong);
        const int64_t expected = int64_t(std::ceil(factor * 20 / 8)), got = kept.keep[3];
        figure(fmt::format("slots that an expert with 10 keeps, factor {}", factor), got, expected, "",
               "ceil(factor T k / N)",
               got == 10             ? "The capacity is not applied."
               : got == expected - 1 ? "The capacity is rounded down."
                                     : "");
        EXPECT(kept.keep[1] == std::min<int64_t>(expected, 1));
    }
    const Kept all(counts, counts, 0, 20);
    figure("slots that all experts keep, factor 0", text_of(all.keep) == "4 1 1 10 1 1 1 1" ? int64_t(20) : int64_t(-1),
           int64_t(20), "", "T k", "Factor 0 is no limit.");
}

TEST_CASE("lab: each sequence for itself") {
    // Three sequences of 4 tokens, k = 1, N = 2, factor 1: 2 slots each.
    const PieceCounts counts{{{0, 0}, {1, 0}, {2, 0}}, {4, 0, 3, 1, 4, 0}};
    const Kept kept(counts, counts, 1, 4);
    if (!kept.wrong.empty()) return expect_none_wrong(kept.wrong);
    const int64_t got = kept.keep[0] + kept.keep[2] + kept.keep[4];
    figure("slots that expert 0 keeps of three sequences", got, int64_t(6), "", "3 ceil(factor T k / N)",
           got == 2 ? "The capacity is shared by the whole micro-batch: the loss depends on its size then." : "");
    EXPECT(kept.keep == Ints{2, 0, 2, 1, 2, 0});
}

TEST_CASE("lab: pieces of a sequence on two ranks") {
    // Sequences 0 and 1 of 8 tokens in pieces of 2, k = 1, N = 2, factor 1: 4 slots each. Rank 0 has the first and the
    // last piece of both, the last ones first in its list; rank 1 the others.
    const PieceCounts mine{{{0, 6}, {0, 0}, {1, 6}, {1, 0}}, {2, 0, 2, 0, 1, 1, 0, 2}};
    const PieceCounts others{{{0, 4}, {0, 2}, {1, 2}, {1, 4}}, {2, 0, 1, 1, 2, 0, 2, 0}};
    PieceCounts all = mine;
    all.pieces.insert(all.pieces.end(), others.pieces.begin(), others.pieces.end());
    all.counts.insert(all.counts.end(), others.counts.begin(), others.counts.end());
    const Kept first(mine, all, 1, 8), second(others, all, 1, 8);
    if (!first.wrong.empty()) return expect_none_wrong(first.wrong);
    // Sequence 0, expert 0: 2, 1, 2, 2 slots by position; of them 2, 1, 1, 0 are kept. Sequence 1: 0, 2, 2, 1.
    int64_t got = 0;
    for (const size_t piece : {0, 1}) got += first.keep[2 * piece] + second.keep[2 * piece];
    figure("slots of one sequence that expert 0 keeps on two ranks", got, int64_t(4), "", "ceil(factor T k / N)",
           got == 7 ? "Each piece for itself: each rank would drop other tokens, in each layout others." : "");
    std::string wrong = differs("rank 0 keeps", first.keep, {0, 0, 2, 0, 0, 1, 0, 2});
    if (wrong.empty()) wrong = differs("rank 1 keeps", second.keep, {1, 0, 1, 1, 2, 0, 2, 0});
    expect_none_wrong(wrong);
}

TEST_CASE("lab: where each expert's slots begin") {
    const PieceCounts counts{{{0, 0}, {1, 0}, {2, 0}}, {3, 0, 2, 1, 0, 4, 0, 0, 5}};
    const Kept all(counts, counts, 0, 5), limited(counts, counts, 1.2, 5);
    if (!all.wrong.empty()) return expect_none_wrong(all.wrong);
    std::string wrong = differs("begin, piece by piece", all.begin, {0, 4, 4, 3, 4, 6, 4, 4, 10});
    Ints begin(9);  // of what the body keeps
    int64_t sum = 0;
    for (const size_t e : {0, 1, 2})
        for (const size_t p : {0, 1, 2}) begin[p * 3 + e] = sum, sum += limited.keep[p * 3 + e];
    if (wrong.empty()) wrong = differs("begin with a capacity", limited.begin, begin);
    expect_none_wrong(wrong);
}

TEST_CASE("lab: places of slots") {
    // Two pieces of 3 rows, k = 2, N = 3.
    const std::vector<int32_t> chosen = {0, 2, 0, 1, 2, 0, 1, 2, 2, 1, 2, 0};
    const std::vector<int32_t> begin_keep = {0, 3, 5, 2, 4, 6, 2, 1, 1, 1, 1, 2};
    Tensor order({8}, DType::i32, Device::cpu), place({6, 2}, DType::i32, Device::cpu);
    fill(order, -7), fill(place, -7);
    place_slots(order, place, indices(chosen, {6, 2}), indices(begin_keep, {2, 2, 3}));
    std::string wrong = differs("place", ints(place), {0, 5, 1, 3, -1, -1, 4, 6, 7, -1, -1, 2});
    if (wrong.empty()) wrong = differs("order", ints(order), {0, 2, 11, 3, 6, 1, 7, 8});
    expect_none_wrong(wrong);
}
