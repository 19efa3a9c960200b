// Grades the lab zigzag.
#include "tests/attention_error.h"
#include "tests/labs.h"
#include "tests/ranks.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// What is wrong with who holds which token; empty: every token is on one rank, and all ranks have equally many.
std::string misplaced(const ContextLayout& layout) {
    const int64_t T = 6 * layout.granularity();
    std::vector<int64_t> holder(size_t(T), -1);
    const std::string where =
        fmt::format("{} ranks, chunks {}, ulysses {}, {} tokens: ", layout.ranks, layout.chunks, layout.ulysses, T);
    for (int64_t rank = 0; rank < layout.ranks; ++rank) {
        int64_t count = 0;
        for (const auto& range : layout.tokens_of(rank, T))
            for (int64_t t = range.begin; t < range.begin + range.count; ++t, ++count) {
                if (t < 0 || t >= T) return fmt::format("{}rank {} holds token {}", where, rank, t);
                if (holder[size_t(t)] >= 0)
                    return fmt::format("{}token {} is on rank {} and on rank {}", where, t, holder[size_t(t)], rank);
                holder[size_t(t)] = rank;
            }
        const int64_t G = layout.groups(), first = std::stoll(drawn("LAB_FIRST", "0"));
        const int64_t step = std::stoll(drawn("LAB_STEP", "1")), group = rank / layout.ulysses;
        const int64_t early = (first + step * group + G) % G;
        const bool is_drawn = first != 0 || step != 1;
        if (is_drawn && layout.chunks == 2 && layout.chunk_index(group, 0) != early)
            return fmt::format("{}group {} has the early chunk {}, your seed's is {}", where, group,
                               layout.chunk_index(group, 0), early);
        if (count != T / layout.ranks) return fmt::format("{}rank {} holds {} tokens", where, rank, count);
    }
    return "";
}

std::string misplaced(int64_t chunks) {
    for (const int64_t ranks : {1, 2, 3, 4, 8})
        if (const std::string wrong = misplaced({ranks, 1, chunks}); !wrong.empty()) return wrong;
    return "";
}

}  // namespace

TEST_CASE("lab: the plain ring") {
    expect_none_wrong(misplaced(1));
    const auto tokens = ContextLayout{4, 1, 1}.tokens_of(2, 64);
    figure("first token of rank 2 of 4, of 64 tokens", tokens.empty() ? int64_t(-1) : tokens[0].begin, int64_t(32), "",
           "r T / N");
}

TEST_CASE("lab: zigzag, every token once") { expect_none_wrong(misplaced(2)); }

TEST_CASE("lab: the work of the rank that has most") {
    const int64_t N = 4, T = 64;
    int64_t most = 0;
    for (int64_t rank = 0; rank < N; ++rank) {
        int64_t pairs = 0;
        for (const auto& range : ContextLayout{N, 1, 2}.tokens_of(rank, T))
            for (int64_t t = range.begin; t < range.begin + range.count; ++t) pairs += t + 1;
        most = std::max(most, pairs);
    }
    const int64_t c = T / N, half = c / 2;
    const int64_t last_of_ring = c * (c + 1) / 2 + (N - 1) * c * c;
    const int64_t strided = c * (c + 1) / 2 + (N - 1) * half * half + (2 * N - 1 - 1) * half * half;
    figure("pairs of query and key, most of a rank", most, T * (T + 1) / 2 / N, "", "T (T+1) / 2N",
           most == last_of_ring
               ? "Two neighbouring chunks are one chunk of the plain ring: the last rank still has the end of "
                 "the sequence."
           : most == strided
               ? "Chunks r and N+r: the last rank has the later one of both halves. Pair an early chunk with a "
                 "late one."
               : "");
}

TEST_CASE("lab: groups of several ranks") {
    for (const ContextLayout& layout : {ContextLayout{4, 2, 2}, ContextLayout{4, 4, 1}, ContextLayout{8, 2, 1}}) {
        expect_none_wrong(misplaced(layout));
        const int64_t T = 16 * layout.ranks;
        for (int64_t rank = 0; rank < layout.ranks; ++rank) {
            const auto mine = layout.tokens_of(rank, T), group = layout.queries_of(rank, T);
            std::string wrong = mine.size() == group.size() ? "" : fmt::format("rank {}: {} ranges", rank, mine.size());
            for (size_t i = 0; i < mine.size() && wrong.empty(); ++i) {
                const int64_t count = group[i].count / layout.ulysses;
                const int64_t begin = group[i].begin + rank % layout.ulysses * count;
                if (mine[i].begin != begin || mine[i].count != count)
                    wrong = fmt::format(
                        "{} ranks, ulysses {}, chunks {}: rank {} holds {} tokens from {} on, expected {} from {} on",
                        layout.ranks, layout.ulysses, layout.chunks, rank, mine[i].count, mine[i].begin, count, begin);
            }
            if (!wrong.empty()) return expect_none_wrong(wrong);
        }
    }
}

TEST_CASE("lab: ring attention") {
    for (const char* algorithm : {"ring", "zigzag", "gather"}) {
        const double error = attention_error(world(), {algorithm}, DType::f32, 1);
        const bool good = everywhere(error <= 2e-6);
        expect_none_wrong(good ? ""
                               : fmt::format("{} on {} ranks: output and gradients are off by {:.2g} of one device's",
                                             algorithm, world().size(), error));
    }
}
