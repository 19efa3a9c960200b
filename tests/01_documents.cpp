// Documents in packed sequences: where they begin, and what a batch says about them on every rank.
#include "01_single_gpu/documents.h"
#include "tests/training.h"

using namespace train70b;
using namespace train70b::test;

namespace {

using Ints = std::vector<int32_t>;

// The definition: the token behind the last end before t.
int32_t start_of(const Ints& sample, int64_t t, int64_t document_token) {
    for (int64_t i = t; i > 0; --i)
        if (sample[size_t(i - 1)] == document_token) return int32_t(i);
    return 0;
}

Ints ints(const Tensor& x) { return Ints(x.data<int32_t>(), x.data<int32_t>() + x.size()); }

}  // namespace

TEST_CASE("a document ends with its token: at the first place, at the last, several in a row, longer than a sequence") {
    const auto starts = [](const Ints& tokens) { return document_starts(tokens, int64_t(tokens.size()) - 1, 9); };
    EXPECT(starts({1, 2, 9, 3, 4, 5, 9, 6, 1}) == Ints{0, 0, 0, 3, 3, 3, 3, 7});
    EXPECT(starts({9, 2, 3, 4, 1}) == Ints{0, 1, 1, 1});
    EXPECT(starts({1, 2, 3, 9, 1}) == Ints{0, 0, 0, 0});  // the next one begins behind the sequence
    EXPECT(starts({1, 2, 3, 4, 9}) == Ints{0, 0, 0, 0});  // a target only
    EXPECT(starts({9, 9, 9, 4, 1}) == Ints{0, 1, 2, 3});
    EXPECT(starts({9, 9}) == Ints{0});
    EXPECT(document_pairs({0, 0, 0, 3, 3, 3, 3, 7}) == 3 * 4 / 2 + 4 * 5 / 2 + 1);
    EXPECT(document_pairs({0, 0, 0, 0}) == 4 * 5 / 2);
    EXPECT(document_pairs({0, 1, 2, 3}) == 4);
}

TEST_CASE("a batch's positions and document starts are those of the whole sample, whichever tokens a rank holds") {
    const Text text;
    TrainOptions o = tiny(text);
    o.micro_batch = 2;
    o.val_fraction = 0.2;
    const Dataset data(o.data, o.model.vocab, o.seq_len, o.val_fraction);
    const std::vector<TokenRange> whole = {{0, 16}}, zigzag = {{4, 4}, {8, 4}}, one = {{15, 1}};
    for (const int64_t token : {int64_t(' '), int64_t('e'), int64_t('\n'), int64_t(200)}) {  // 200: in no sample
        o.document_token = token;
        int64_t inner_starts = 0;
        for (const auto& [tokens, queries] : {std::pair{whole, whole}, {{}, {}}, {zigzag, zigzag}, {one, zigzag}})
            for (const int64_t step : {1, 2, 0}) {  // 0: validation
                Batches batches(o, data);
                if (!tokens.empty()) batches.of_rank = [&](int64_t) { return RankTokens{tokens, queries}; };
                const Coordinate dp(1, 4);
                const Batch batch = step > 0 ? batches.micro_batch(dp, step, 0) : batches.validation_batch(dp, 0);
                std::vector<Ints> samples;
                for (int64_t i = 2; i < 4; ++i)
                    samples.push_back(step > 0 ? batches.samples(step)[size_t(i)] : data.validation_sample(i));
                Ints positions, starts;
                double pairs = 0;
                for (const auto [begin, count] : tokens.empty() ? whole : tokens)
                    for (const Ints& sample : samples)
                        for (int64_t t = begin; t < begin + count; ++t)
                            positions.push_back(int32_t(t) - start_of(sample, t, token));
                for (const auto [begin, count] : queries.empty() ? whole : queries)
                    for (const Ints& sample : samples)
                        for (int64_t t = begin; t < begin + count; ++t) starts.push_back(start_of(sample, t, token));
                for (const Ints& sample : samples)
                    for (int64_t t = 0; t < 16; ++t)
                        for (int64_t key = 0; key <= t; ++key) pairs += key >= start_of(sample, t, token);
                INFO("token ", token, ", ", tokens.size(), " ranges, step ", step);
                EXPECT(ints(batch.positions) == positions);
                EXPECT(ints(batch.document_starts.on_device) == starts);
                EXPECT(Ints(batch.document_starts.on_host.get(), batch.document_starts.on_host.get() + starts.size()) ==
                       starts);
                EXPECT(batch.document_pairs == pairs);
                const DocumentStarts part = batch.document_starts.rows(1, int64_t(starts.size()));
                EXPECT(ints(part.on_device) == Ints(starts.begin() + 1, starts.end()));
                EXPECT(part.on_host.get()[0] == starts[1]);
                inner_starts += std::count_if(starts.begin(), starts.end(), [](int32_t s) { return s > 0; });
            }
        EXPECT((inner_starts > 0) == (token != 200));
    }
}

TEST_CASE("without a document token a batch has no documents, and positions count from the sequence's beginning") {
    const Text text;
    const TrainOptions o = tiny(text);
    const Dataset data(o.data, o.model.vocab, o.seq_len, o.val_fraction);
    Batches batches(o, data);
    const Batch batch = batches.micro_batch(Coordinate(0, 1), 1, 0);
    EXPECT(!batch.document_starts);
    EXPECT(batch.document_pairs == 0);
    for (int64_t row = 0; row < 8 * 16; ++row) EXPECT(ints(batch.positions)[size_t(row)] == row % 16);
}
