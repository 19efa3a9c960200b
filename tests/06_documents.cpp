// Documents in sequences that are spread over ranks: losses and gradients, FLOPs and bytes, steps of the ring.
#include "tests/context.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("documents: every algorithm's loss and gradients are the sums over the documents, each alone on one device") {
    const DocumentText text;
    int64_t number = 0;
    for (const uint64_t seed : {1, 2, 3, 4}) {  // other samples each time
        TrainOptions o = shape(Text(), seed % 2 ? 2 : 8, 8);
        o.data = text.path;
        o.dtype = "fp64";
        o.steps = 1;
        o.seed = seed;
        o.document_token = kEnd;
        std::optional<Alone> alone;
        only_on_rank_0([&] { alone.emplace(o); });
        for (const int64_t cp : {1, 2, 4, 8})
            for (const ContextParallelOptions& options : algorithms(cp)) {
                const std::vector<std::string> levels = recompute_names();
                o.recompute = levels[size_t(number++) % levels.size()];
                if (!in_quarter(number)) continue;
                Context run(o, world(), cp, options);
                run.session.run();
                const Farthest deviation = alone ? alone->deviation(run.session) : Farthest();
                INFO(options_text(options), ", cp ", cp, ", seed ", seed, ", recompute ", o.recompute, ": ", deviation);
                EXPECT_EVERYWHERE(deviation <= 1e-10);
                double pairs = 0;
                for (const Sample& sample : run.session.trainer.batches.global_batch(1))
                    pairs += document_pairs(document_starts(sample.tokens, o.seq_len, kEnd));
                EXPECT_EVERYWHERE(run.session.reports[0].attention_pairs == pairs);
            }
    }
}

TEST_CASE("documents: FLOPs are those of the pairs that are left, rank by rank; bytes are those without documents") {
    const DocumentText text;
    Failures failures;
    for (const uint64_t seed : {1, 2}) {
        if (!in_half(int64_t(seed))) continue;
        TrainOptions o = shape(Text(), 2, 2);
        o.data = text.path;
        o.steps = 1;
        o.seed = seed;
        const Dataset data(o.data, o.model.vocab, o.seq_len, o.val_fraction);
        TrainOptions packed = o;
        packed.document_token = kEnd;
        for (const int n : {2, 4, 8})
            on_first_ranks(n, [&](const Comm& ranks) {
                for (const ContextParallelOptions& options : algorithms_in_turn(n)) {
                    const SecondStep run(packed, ranks, options);
                    const auto expect = [&](bool good, const std::string& what) {
                        failures.expect(good, fmt::format("cp {}, {}: {}", n, options_text(options), what));
                    };
                    for (int64_t rank = 0; rank < n; ++rank) {
                        // Query by query and key by key: those of the rank's group, for its share of the heads.
                        double pairs = 0, formula = 0;
                        for (const auto& [sample, targets] : Batches(o, data).global_batch(2)) {
                            for (int64_t other = 0; other < n; ++other)
                                if (other / run.layout.ulysses == rank / run.layout.ulysses)
                                    for (const auto [begin, count] : run.layout.tokens_of(other, o.seq_len))
                                        for (int64_t t = begin; t < begin + count; ++t)
                                            for (int64_t key = 0; key <= t; ++key)
                                                pairs += key >= start_of(sample, t, kEnd);
                            formula += attention_pairs(run.layout, rank, document_starts(sample, o.seq_len, kEnd));
                        }
                        expect(formula == pairs, fmt::format("pairs of rank {}", rank));
                        expect(run.flops[size_t(rank)] == 14 * 8 * 2 * pairs * 8 / double(run.layout.ulysses),
                               fmt::format("FLOPs of rank {}", rank));
                    }
                    expect(run.sent == run.formula && run.sent == SecondStep(o, ranks, options).sent, "bytes");
                }
            });
    }
    EXPECT_NONE(failures);
}

TEST_CASE("documents: the ring computes no step that they mask, and goes round all the same") {
    Folder folder;
    const std::string path = folder / "ends.txt";
    std::ofstream(path) << std::string(2000, char(kEnd));
    TrainOptions o = shape(Text(), 2, 8);
    o.data = path;
    o.steps = 1;
    o.document_token = kEnd;  // every token is a document: only the chunks on the diagonal are left
    for (const char* algorithm : {"ring", "zigzag"}) {
        const ProfileScope scope({.sums_on = true});
        Context run(o, world(), 8, {algorithm});
        run.session.run();
        const int64_t calls = o.model.layers * run.layout.chunks;
        EXPECT_EVERYWHERE(profile().sums["attention"].calls == calls);
        EXPECT_EVERYWHERE(profile().sums["attention_backward"].calls == calls);
        EXPECT_EVERYWHERE(profile().sums["attention"].flops == 4 * 8 * 8 * 2 * 8 * 48 / 8);
    }
}
