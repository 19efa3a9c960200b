// Documents in packed sequences: where they begin, and what a batch says about them on every rank.
#include "01_single_gpu/complete/run/generate.h"
#include "tests/documents.h"

using namespace train70b;
using namespace train70b::test;

namespace {

using Ints = std::vector<int32_t>;

Ints int_list(const Tensor& x) { return Ints(x.data<int32_t>(), x.data<int32_t>() + x.size()); }

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

TEST_CASE("a batch's positions, document and window starts are the whole sample's, whichever tokens a rank holds") {
    const Text text;
    TrainOptions o = tiny(text);
    o.model.layers = 4, o.model.window = 5, o.model.windowed = {true, false, true, true};
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
                int64_t targets = 0;
                const Batch batch =
                    step > 0 ? batches.micro_batch(dp, step, 0) : batches.validation_batch(dp, 0, 0, targets);
                std::vector<Ints> samples;
                for (int64_t i = 2; i < 4; ++i)
                    samples.push_back(
                        (step > 0 ? batches.global_batch(step)[size_t(i)] : data.validation_sample(0, i)).tokens);
                Ints positions, starts;
                double pairs = 0;
                for (const auto [begin, count] : tokens.empty() ? whole : tokens)
                    for (const Ints& sample : samples)
                        for (int64_t t = begin; t < begin + count; ++t)
                            positions.push_back(int32_t(t) - start_of(sample, t, token));
                for (const auto [begin, count] : queries.empty() ? whole : queries)
                    for (const Ints& sample : samples)
                        for (int64_t t = begin; t < begin + count; ++t) starts.push_back(start_of(sample, t, token));
                Ints windows = starts;
                size_t row = 0;
                for (const auto [begin, count] : queries.empty() ? whole : queries)
                    for (size_t i = 0; i < samples.size(); ++i)
                        for (int64_t t = begin; t < begin + count; ++t, ++row)
                            windows[row] = std::max(windows[row], int32_t(t) - 4);
                for (const Ints& sample : samples)
                    for (int64_t t = 0; t < 16; ++t)
                        for (int64_t key = 0; key <= t; ++key)
                            pairs += (key >= start_of(sample, t, token)) * (key > t - 5 ? 1 : 0.25);
                INFO("token ", token, ", ", tokens.size(), " ranges, step ", step);
                EXPECT(int_list(batch.positions) == positions);
                EXPECT(int_list(batch.document_starts.on_device) == starts);
                EXPECT(int_list(batch.window_starts.on_device) == windows);
                EXPECT(Ints(batch.document_starts.on_host.get(), batch.document_starts.on_host.get() + starts.size()) ==
                       starts);
                EXPECT(batch.document_pairs == pairs);
                const DocumentStarts part = batch.document_starts.rows(1, int64_t(starts.size()));
                EXPECT(int_list(part.on_device) == Ints(starts.begin() + 1, starts.end()));
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
    for (int64_t row = 0; row < 8 * 16; ++row) EXPECT(int_list(batch.positions)[size_t(row)] == row % 16);
}

TEST_CASE(
    "packing: a sample's loss and every gradient are the sums over its documents, each computed alone, to 1e-10") {
    const DocumentText text;
    TrainOptions o = tiny(Text());
    o.data = text.path;
    o.dtype = "fp64";
    o.steps = 1;
    o.document_token = kEnd;
    int64_t documents = 0;
    for (const int64_t seq_len : {1, 7, 16, 50, 130})
        for (const uint64_t seed : {1, 2, 3})
            for (const char* recompute : {"none", "pointwise", "selective", "full"}) {
                if (recompute != std::string("none") && seq_len != 50) continue;
                o.seq_len = seq_len;
                o.seed = seed;
                o.recompute = recompute;
                o.model.kv_heads = seed == 3 ? 4 : int64_t(seed);
                o.global_batch = 6;
                o.micro_batch = seed == 2 ? 3 : 6;
                const Alone alone(o);
                documents += alone.counted;
                Session packed(o);
                const Farthest deviation = alone.deviation(packed.run());
                INFO(seq_len, " tokens, seed ", seed, ", recompute ", std::string(recompute), ", ", alone.counted,
                     " documents: ", deviation);
                EXPECT(deviation <= 1e-10);
                double pairs = 0;
                for (const Sample& sample : packed.trainer.batches.global_batch(1))
                    pairs += document_pairs(document_starts(sample.tokens, seq_len, kEnd));
                EXPECT(packed.reports[0].attention_pairs == pairs);
                const LlamaConfig& c = o.model;
                const double rest = 6.0 * double(c.parameters() - c.vocab * c.hidden) * 6 * double(seq_len);
                EXPECT(std::abs(packed.reports[0].flops / (rest + 12.0 * double(c.layers * c.hidden) * pairs) - 1) <=
                       1e-12);
            }
    EXPECT(documents > 500);
    // Without the token the same samples are other sequences, and the FLOPs are those of whole ones.
    Session packed(o);
    packed.run();
    o.document_token.reset();
    Session whole(o);
    EXPECT(std::abs(whole.run().reports[0].loss / packed.reports[0].loss - 1) > 1e-4);
    EXPECT(!whole.reports[0].attention_pairs);
    EXPECT(whole.reports[0].flops == flops_per_token(o.model, double(o.seq_len)) * 6 * double(o.seq_len));
}

TEST_CASE("a document token that is in no sample changes no bit of losses, norms and weights") {
    const Text text;
    TrainOptions o = tiny(text);
    Session without(o);
    o.document_token = 200;
    Session with(o);
    EXPECT(with.run().history() == without.run().history());
    EXPECT(with.weights() == without.weights());
    EXPECT(with.reports[0].attention_pairs == 8.0 * 16 * 17 / 2);
    // A document start for each token of a micro-batch is what it costs.
    const auto bytes = [](const Session& s) { return s.reports[1].peak.kind[int(Memory::activations)]; };
    EXPECT(bytes(with) - bytes(without) == 4 * 8 * 16);
}

TEST_CASE("evaluation and generation see documents") {
    const DocumentText text;
    TrainOptions o = tiny(Text());
    o.data = text.path;
    o.steps = 2;
    o.val_fraction = 0.2;
    Session plain(o);
    plain.run();
    o.document_token = kEnd;
    Session packed(o);
    packed.run();
    EXPECT(std::abs(evaluate(packed.trainer) / evaluate(plain.trainer) - 1) > 1e-4);

    // What stands before the prompt's last end does not matter; without documents it does.
    const auto behind = [&](Session& s, const Ints& prompt) {
        const Ints all = generate(s.trainer, prompt, 12, 1);
        return Ints(all.begin() + int64_t(prompt.size()), all.end());
    };
    const Ints a = {'a', 'b', 'c', kEnd, 'x', 'y'}, b = {'q', 'r', 's', kEnd, 'x', 'y'};
    EXPECT(behind(packed, a) == behind(packed, b));
    EXPECT(behind(plain, a) != behind(plain, b));
}
