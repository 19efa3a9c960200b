// The recorded steps of real layouts match, and mistakes made in them are found. In one process: collective operations
// of a dry run have no peers.
#include "08_3d_full/plan/record.h"
#include "tests/drawn_layouts.h"
#include "tests/grid_layouts.h"
#include "tests/mistakes.h"

using namespace train70b;
using namespace train70b::test;

namespace {

Recording recorded(const TrainOptions& options, ParallelConfig config, const RecordOptions& how = {}) {
    validate(config, options, config.mesh.size());
    const Dataset data(options.data, options.model.vocab, options.seq_len, 0);
    return record_step(options, data, config, how);
}

Recording recorded(const Text& text, const GridLayout& layout, int64_t family, const RecordOptions& how = {}) {
    TrainOptions o = grid_shape(text);
    layout.use_family(o.model, family);
    o.model.tied = layout.tied;
    o.recompute = layout.recompute;
    return recorded(o, layout.config(), how);
}

// Simulated rank by rank and by class, and executed by the slow version.
void expect_match(Survey& survey, const Recording& recording) { EXPECT(survey.check(recording, "none") == ""); }

}  // namespace

TEST_CASE("the layouts of the parity grid match") {
    const Text text;
    Survey survey;
    int64_t number = 0;
    for (const GridLayout& layout : grid_layouts()) {
        const int64_t at = number++;
        if (!in_slice(at + at / 8)) continue;
        INFO(layout.text());
        expect_match(survey, recorded(text, layout, at % 3));
        expect_match(survey, recorded(text, layout, at % 3, {.most_ranks = 0}));
    }
    fmt::print("the grid: {} recordings\n", survey.cases);
    EXPECT(survey.cases >= (all_slices() ? 80 : 10));
}

TEST_CASE("tied embeddings match") {
    const Text text;
    Survey survey;
    for (GridLayout layout : std::vector<GridLayout>{
             {.mesh = {.tp = 2, .cp = 2, .dp = 2, .pp = 2}, .pipeline = "interleaved", .zero = 3, .sequence = true},
             {.mesh = {.dp = 4, .pp = 4}, .pipeline = "zero-bubble", .zero = 3, .hybrid_shard = 2},
             {.mesh = {.tp = 2, .cp = 2, .dp = 2, .pp = 2}, .pipeline = "zb-v", .zero = 3, .sequence = true}}) {
        layout.tied = true;
        INFO(layout.text());
        expect_match(survey, recorded(text, layout, 0));
        expect_match(survey, recorded(text, layout, 0, {.most_ranks = 0}));
    }
}

TEST_CASE("steps of which few micro-batches were run match") {
    const Text text;
    Survey survey;
    int64_t number = 0;
    for (const GridLayout& layout : std::vector<GridLayout>{
             {.mesh = {.tp = 2, .dp = 2}, .zero = 3, .sequence = true},
             {.mesh = {.dp = 2, .pp = 4}, .zero = 3},
             {.mesh = {.dp = 2, .pp = 4}, .pipeline = "gpipe", .zero = 2},
             {.mesh = {.tp = 2, .dp = 2, .pp = 2}, .pipeline = "interleaved", .zero = 2, .overlap = true},
             {.mesh = {.cp = 2, .pp = 4}, .pipeline = "zero-bubble", .context = "ring"},
             {.mesh = {.dp = 2, .pp = 2}, .pipeline = "zb-v", .zero = 2},
             {.mesh = {.tp = 2, .pp = 2}, .pipeline = "dualpipe-v", .sequence = true}}) {
        if (!in_half(number++)) continue;
        TrainOptions o = grid_shape(text);
        o.global_batch = 60 * layout.mesh.dp;
        INFO(layout.text());
        const Recording recording = recorded(o, layout.config());
        EXPECT(recording.of(0).micro_batches_run < 60);
        expect_match(survey, recording);
    }
}

TEST_CASE("a hundred random layouts match, on 2 to 32 ranks") {
    const Text text;
    Survey survey;
    for (int64_t number = 0; number < 100; ++number) {
        if (!in_slice(number + number / 8)) continue;
        for (uint64_t attempt = 0;; ++attempt) {
            REQUIRE(attempt < 200);
            Drawn drawn = draw(text, int64_t(2) << number % 5, uint64_t(number), attempt);
            drawn.config.optimizer = "adamw";  // a simulated rank does not know what the others send for Muon
            try {
                check_config(drawn.options.model);
                INFO(drawn.text());
                expect_match(survey, recorded(drawn.options, drawn.config));
                expect_match(survey, recorded(drawn.options, drawn.config, {.most_ranks = 0}));
                break;
            } catch (const UsageError&) {}  // no layout: the next draw
        }
    }
    fmt::print("random layouts: {} recordings\n", survey.cases);
    EXPECT(survey.cases >= (all_slices() ? 200 : 24));
}

TEST_CASE("mistakes in recorded steps: every changed call is found, and the rank that makes it named") {
    const Text text;
    Survey survey;
    int64_t number = 0;
    for (const GridLayout& layout : grid_layouts()) {
        const int64_t at = number++;
        if (!in_quarter(at)) continue;
        const Recording recording = recorded(text, layout, at % 3);
        const GroupTable groups(recording);
        for (uint64_t each = 0; each < (all_slices() ? 200 : 40); ++each) {
            Draws draws(uint64_t(at) * 1000 + each);
            const int64_t rank = draws.below(recording.ranks);
            RankEdit list(recording, rank);
            const RankEdit before = list;
            const std::string mistake = make_mistake(list, draws, recording);
            if (mistake.empty()) continue;
            Recording edited = recording;
            list.store(edited);
            INFO(layout.text(), ", rank ", rank, ": ", mistake);
            const std::string wrong = survey.check(edited, mistake);
            INFO(wrong);
            // Two calls in the other order may be as good; a call in a group of one rank has nobody to disagree.
            if (mistake.find("two") == mistake.npos) EXPECT(wrong != "");
            if (!wrong.empty() && wrong.find("and so on") == wrong.npos)
                EXPECT(wrong.find(fmt::format("rank {} ", rank)) != wrong.npos);
        }
    }
    survey.print();
    EXPECT(survey.cases > (all_slices() ? 500 : 125));
}

TEST_CASE("16,384 ranks, whether they match or one of them does not") {
    const Text text;
    TrainOptions o = of_model(
        tiny(text), {.layers = 32, .hidden = 32, .heads = 8, .kv_heads = 8, .ffn = 48, .vocab = 136}, 32, 128 * 64);
    o.micro_batch = 1;
    const Recording recording = recorded(o, {.mesh = {.tp = 8, .dp = 128, .pp = 16}});
    EXPECT(mismatch(recording, true) == "");
    const auto family = [&](const std::string& name) {
        const auto named = [&](const GroupFamily& each) { return each.name == name; };
        return int(std::find_if(recording.families.begin(), recording.families.end(), named) -
                   recording.families.begin());
    };
    const int tp = family("tp"), dp = family("dp");
    // A barrier of one tp group behind its gradients' reduction: the group is late, no more. In two groups, with one
    // rank of each behind, and not the same one: a deadlock of four.
    const auto with_barriers = [&](const std::vector<int64_t>& behind, int64_t end) {
        Recording edited = recording;
        for (int64_t rank = 2048; rank < end; ++rank) {
            RankEdit list(edited, rank);
            const std::vector<size_t> sums =
                list.calls([&](const CommCall& call) { return call.operation == "all_reduce" && call.family == dp; });
            REQUIRE(!sums.empty());
            size_t at = sums[0] - 1;
            if (std::find(behind.begin(), behind.end(), rank) != behind.end())
                for (size_t i = 0; i < list.items.size(); ++i)
                    if (list.items[i].id == list.items[sums.back()].id) at = i;  // its wait
            list.insert(at, collective(tp, "barrier", 0, "extra.cpp:1"));
            list.store(edited);
        }
        return mismatch(edited, true);
    };
    EXPECT(with_barriers({2048, 2049, 2050, 2051, 2052, 2053, 2054, 2055}, 2056) == "");
    EXPECT(with_barriers({2048, 2056}, 2064) == "");
    expect_parts(with_barriers({2048, 2057}, 2064),
                 {"rank 2048 waits in dp.all_reduce #1", "for rank 2056; rank 2056 waits in tp.barrier",
                  "(extra.cpp:1) for rank 2057; rank 2057 waits in dp.all_reduce #1", "for rank 2049",
                  "rank 2049 waits in tp.barrier", "(extra.cpp:1) for rank 2048"});
    Recording wrong_one = recording;
    RankEdit list(wrong_one, 9999);
    list.items[list.calls([&](const CommCall& call) { return call.family == tp; }).back()].call.bytes += 4;
    list.store(wrong_one);
    expect_parts(mismatch(wrong_one, true), {"rank 9992 calls tp.", "but rank 9999 calls tp.", "(all others match)"});
}
