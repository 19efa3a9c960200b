// All ranks' calls matched: random programs and mistakes against an execution of them.
#include <set>

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
