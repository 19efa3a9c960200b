// All ranks' calls matched: random programs and mistakes against an execution of them, and a large world.
#include <chrono>
#include <set>

#include "08_3d_full/plan/check_calls.h"
#include "tests/mistakes.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// A few ranks make collectives, messages and shifts in random groups, some waited for later: all in one order of the
// whole, so that they match.
Recording random_program(Draws& draws) {
    const int64_t ranks = 2 + draws.below(5);
    ByHand hand(ranks);
    for (int i = 0; i < 3; ++i) {
        std::vector<int> colors;
        for (int64_t rank = 0; rank < ranks; ++rank) colors.push_back(int(draws.below(3)) - (draws.below(4) == 0));
        hand.family(fmt::format("g{}", i), colors);
    }
    const GroupTable groups(hand.recording);
    std::vector<std::map<int, std::vector<int64_t>>> open(static_cast<size_t>(ranks));  // families: calls to wait for
    std::vector<std::map<int, int64_t>> made(static_cast<size_t>(ranks));
    const auto call = [&](int64_t rank, const CommCall& each) {
        hand.later(rank, each);
        open[size_t(rank)][each.family].push_back(++made[size_t(rank)][each.family]);
    };
    const auto wait = [&](int64_t rank, int family) {
        std::vector<int64_t>& calls = open[size_t(rank)][family];
        if (calls.empty()) return;
        hand.wait(rank, family, int32_t(made[size_t(rank)][family] - calls.front() + 1));
        calls.erase(calls.begin());
    };
    const int64_t calls = 4 + draws.below(20);
    for (int64_t i = 0; i < calls; ++i) {
        const int family = int(draws.below(4));
        if (groups.of(family).members.empty()) continue;
        const auto& members = draws.one_of(groups.of(family).members);
        const int size = int(members.size());
        const int64_t elements = 1 + draws.below(3), what = draws.below(6);
        if (size < 2) continue;
        const std::string where = fmt::format("random.cpp:{}", i);
        if (what == 0) {
            const int from = int(draws.below(size)), to = int((from + 1 + draws.below(size - 1)) % size);
            call(members[size_t(from)], send(family, elements, to, where));
            call(members[size_t(to)], recv(family, elements, from, where));
        } else {
            for (int place = 0; place < size; ++place)
                call(members[size_t(place)],
                     what == 1   ? ring_shift(family, elements, place, size, where)
                     : what == 2 ? broadcast(family, elements, int(elements) % size, where)
                                 : collective(family, what == 3 ? "all_gather" : "all_reduce", elements, where));
        }
        for (const int32_t rank : members)
            while (draws.below(3) > 0 && !open[size_t(rank)][family].empty()) wait(rank, family);
    }
    return hand.recording;
}

// The same on 2 x 2 x 2 or 2 x 3 x 2 ranks: every call in all groups along an axis, or a plane, of the mesh at once, so
// that many ranks have equal sequences.
Recording random_symmetric_program(Draws& draws) {
    const int64_t middle = 2 + draws.below(2), ranks = 4 * middle;
    ByHand hand(ranks);
    const auto along = [&](const char* name, bool a, bool b, bool c) {  // the axes along which a group extends
        std::vector<int> colors;
        for (int64_t rank = 0; rank < ranks; ++rank)
            colors.push_back(int((a ? 0 : rank % 2) + (b ? 0 : 2 * (rank / 2 % middle)) +
                                 (c ? 0 : 2 * middle * (rank / 2 / middle))));
        hand.family(name, colors);
    };
    along("a", true, false, false), along("b", false, true, false), along("c", false, false, true);
    along("ab", true, true, false), along("bc", false, true, true);
    const GroupTable groups(hand.recording);
    const int64_t calls = 3 + draws.below(12);
    for (int64_t i = 0; i < calls; ++i) {
        const int family = int(draws.below(6));
        const int64_t what = draws.below(9), later = draws.below(2);
        const std::string where = fmt::format("random.cpp:{}", i);
        for (const auto& members : groups.of(family).members)
            for (size_t place = 0; place < members.size(); ++place) {
                const int32_t rank = members[place];
                const int size = int(members.size());
                if (what == 0 && place < 2)
                    hand.later(rank, place == 0 ? send(family, 4, 1, where) : recv(family, 4, 0, where));
                else if (what > 0 && what < 3)
                    hand.later(rank, ring_shift(family, 4, int(place), size, where));
                else if (what > 2)
                    hand.later(rank, collective(family, what < 6 ? "all_gather" : "all_reduce", 4, where));
                if (later == 0 && (what > 0 || place < 2)) hand.wait(rank, family);
            }
    }
    return hand.recording;
}

}  // namespace

TEST_CASE("random programs and mistakes: the same verdict as an execution") {
    Survey survey;
    for (uint64_t number = 0; number < 4000; ++number) {
        if (!in_slice(int64_t(number + number / 8))) continue;
        Draws draws(7000 + number);
        Recording recording = random_program(draws);
        if (number % 8 == 0) {
            survey.check(recording, "none");
            EXPECT(survey.found["none"][1] == 0);
        }
        std::string mistake;
        for (int64_t mistakes = 0; mistakes < 1 + int64_t(number % 3); ++mistakes) {
            const int64_t rank = draws.below(recording.ranks);
            RankEdit list(recording, rank);
            const std::string name = make_mistake(list, draws, recording);
            if (name.empty()) continue;
            list.store(recording);
            mistake = mistake.empty() ? name : "several";
        }
        if (!mistake.empty()) survey.check(recording, mistake);
    }
    survey.print();
    EXPECT(survey.cases > (all_slices() ? 2000 : 250));
    EXPECT(survey.deadlocks > (all_slices() ? 50 : 6));
}

TEST_CASE("random programs of equal ranks, and mistakes that several of them make: the same verdict by class") {
    Survey survey;
    int64_t classes = 0, ranks = 0;
    for (uint64_t number = 0; number < 2000; ++number) {
        if (!in_slice(int64_t(number + number / 8))) continue;
        Draws draws(900000 + number);
        Recording recording = random_symmetric_program(draws);
        if (number % 8 == 0) {
            survey.check(recording, "none");
            EXPECT(survey.found["none"][1] == 0);
        }
        // On every rank whose number leaves a remainder, or all but one.
        const int64_t by = draws.one_of(std::vector<int64_t>{1, 2, 3, 4, 6, recording.ranks}), rest = draws.below(by);
        const bool others = draws.below(2) == 0;
        std::string mistake;
        for (int64_t rank = 0; rank < recording.ranks; ++rank) {
            if ((rank % by == rest) == others) continue;
            Draws same(1000000 + number);
            RankEdit list(recording, rank);
            const std::string name = make_mistake(list, same, recording);
            if (name.empty()) continue;
            list.store(recording);
            mistake = name;
        }
        if (mistake.empty()) continue;
        survey.check(recording, mistake);
        std::set<int32_t> used;
        const Recording shared = merged(recording);
        for (const int32_t each : shared.class_of) used.insert(each);
        classes += int64_t(used.size());
        ranks += recording.ranks;
    }
    survey.print();
    fmt::print("{} sequences of {} ranks\n", classes, ranks);
    EXPECT(2 * classes < ranks);
    EXPECT(survey.deadlocks > (all_slices() ? 50 : 6));
}

// ---- size -----------------------------------------------------------------------------------------------------------

namespace {

// 16 stages of 1024 ranks, tp 8 x dp 128, as a recording of one sequence per stage has it: shared lists of events.
Recording large(int64_t micro_batches, int64_t calls_per_part) {
    constexpr int64_t kStages = 16, kStageRanks = 1024;
    Recording recording{.ranks = kStages * kStageRanks};
    const auto family = [&](const char* name, int parent, int64_t size, const std::function<int64_t(int64_t)>& color) {
        GroupFamily made{name, parent, {}};
        for (int64_t rank = 0; rank < size; ++rank) made.colors.push_back(int(color(rank)));
        recording.families.push_back(made);
        return int(recording.families.size()) - 1;
    };
    recording.families = {{.name = "world"}};
    const int tp = family("tp", 0, recording.ranks, [](int64_t rank) { return rank / 8; });
    const int dp = family("dp", 0, recording.ranks, [](int64_t rank) { return rank / 1024 * 8 + rank % 8; });
    const int pp = family("pp", 0, recording.ranks, [](int64_t rank) { return rank % 1024; });
    std::vector<int> up, down;
    for (int64_t stage = 0; stage + 1 < kStages; ++stage)
        for (std::vector<int>* channels : {&up, &down})
            channels->push_back(
                family("pp", pp, kStages, [=](int64_t i) { return i == stage || i == stage + 1 ? 0 : -1; }));
    const Schedule schedule = make_schedule("1f1b", kStages, micro_batches);
    for (int64_t stage = 0; stage < kStages; ++stage) {
        Sequence s{.rank = stage * kStageRanks};
        const auto add = [&](const CommCall& call, bool wait) {
            s.segments.back().push_back({.kind = Event::Kind::call, .what = int32_t(s.calls.size())});
            s.calls.push_back(call);
            if (wait)
                s.segments.back().push_back({.kind = Event::Kind::wait, .family = int16_t(call.family), .what = 1});
        };
        for (const Pass pass : {Pass::forward, Pass::backward}) {
            s.segments.emplace_back();
            const bool forward = pass == Pass::forward;
            const int64_t from = stage + (forward ? -1 : 1), to = stage + (forward ? 1 : -1);
            const auto channel = [&](int64_t other) { return (forward ? up : down)[size_t(std::min(stage, other))]; };
            if (from >= 0 && from < kStages)
                add(Step8::channel(recv(channel(from), 4096, from > stage, "pipeline.cpp:20")), true);
            for (int64_t i = 0; i < calls_per_part; ++i) {
                const char* operation = i % 2 ? "reduce_scatter" : "all_gather";
                for (int k = 0; k < 8; ++k) s.segments.back().push_back({.kind = Event::Kind::compute});
                add(collective(tp, operation, 1024 + i, "layer.cpp:1"), true);
            }
            if (to >= 0 && to < kStages)
                add(Step8::channel(send(channel(to), 4096, to > stage, "pipeline.cpp:10")), false);
        }
        for (const Step& step : schedule.ranks[size_t(stage)])
            s.parts.push_back({Sequence::Part::Kind::schedule_step, step, step.pass == Pass::forward ? 0 : 1});
        s.segments.emplace_back();
        add(collective(dp, "all_reduce", 1 << 20, "zero.cpp:1"), true);
        add(collective(0, "scalar", 1, "trainer.cpp:1"), true);
        s.parts.push_back({Sequence::Part::Kind::gradients, {}, 2});
        for (int64_t i = 0; i < kStageRanks; ++i) recording.class_of.push_back(int32_t(stage));
        recording.sequences.push_back(s);
    }
    return recording;
}

}  // namespace

TEST_CASE("16,384 ranks: seconds, whether they match or one of them does not") {
    const auto timed = [](const Recording& recording) {
        const auto begin = std::chrono::steady_clock::now();
        const std::optional<Mismatch> result = mismatch(recording);
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        fmt::print("{} ranks, {} sequences: {:.2f} s: {}\n", recording.ranks, recording.sequences.size(), seconds,
                   result ? result->text : match_text(recording));
        return result ? result->text : "";
    };
    Recording recording = large(64, 100);
    EXPECT(timed(recording) == "");
    // A barrier of one tp group behind its gradients' reduction: the group is late, no more. In two groups, with one
    // rank of each behind, and not the same one: a deadlock of four.
    const auto with_barriers = [&](const std::vector<int64_t>& behind, int64_t end) {
        Recording edited = recording;
        for (int64_t rank = 2048; rank < end; ++rank)
            Step8::change(edited, rank, [&](RankEdit& list) {
                const bool late = std::find(behind.begin(), behind.end(), rank) != behind.end();
                list.insert(list.items.size() - (late ? 3 : 5), collective(1, "barrier", 0, "extra.cpp:1"));
            });
        return edited;
    };
    EXPECT(timed(with_barriers({2048, 2049, 2050, 2051, 2052, 2053, 2054, 2055}, 2056)) == "");
    EXPECT(timed(with_barriers({2048, 2056}, 2064)) == "");
    expect_parts(
        timed(with_barriers({2048, 2057}, 2064)),
        {"rank 2048 waits in dp.all_reduce #1, 1048576 fp32 in gradients (zero.cpp:1) for rank 2056",
         "rank 2056 waits in tp.barrier #12801, 0 fp32 in B63 (extra.cpp:1) for rank 2057",
         "rank 2057 waits in dp.all_reduce", "for rank 2049", "rank 2049 waits in tp.barrier", "for rank 2048"});
    Recording wrong_one = recording;
    Step8::change(wrong_one, 9999, [&](RankEdit& list) { list.items[at(list, "layer.cpp:1", 5000)].call.bytes += 4; });
    expect_parts(timed(wrong_one), {"rank 9992 calls tp.", "but rank 9999 calls", "layer.cpp:1"});
}
