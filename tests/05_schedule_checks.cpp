// Schedules that are wrong: what the checks say of them, in memory and in a file. And what the tables and drawings
// show.
#include <array>
#include <deque>
#include <map>
#include <regex>
#include <set>

#include "tests/schedules.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("a schedule with an error is refused, and the checker says where") {
    const auto refused = [](const Schedule& schedule, const std::string& part) {
        const std::string text = incomplete(schedule);
        INFO(text);
        EXPECT(text.find(part) != std::string::npos);
    };
    refused(two_ranks("F0 B0 F1 B1 ", "F0 B0 F1 ", 2), "rank 1: micro-batch 1 goes through chunk 0 as \"F\"");
    refused(two_ranks("F0 B0 F1 B1 ", "B0 F0 F1 B1 ", 2), "rank 1: B0 comes before the F of its micro-batch");
    refused(two_ranks("F0 F0 B0 F1 B1 ", "F0 B0 F1 B1 ", 2),
            "rank 0: F0 is one too many: F of its micro-batch came before");
    refused(two_ranks("F0 B0 F1 W1 I1 ", "F0 B0 F1 B1 ", 2), "rank 0: W1 comes before the I of its micro-batch");
    refused(two_ranks("F0 B0 W0 F1 B1 ", "F0 B0 F1 B1 ", 2), "rank 0: W0 is one too many: FB of its micro-batch");
    refused(two_ranks("F0 B0 F1 B1 F2 ", "F0 B0 F1 B1 ", 2), "rank 0: F2 names no micro-batch");
    Schedule another_chunk = two_ranks("F0 B0 ", "F0 B0 ", 1);
    for (const Pass pass : {Pass::forward, Pass::backward}) another_chunk.ranks[1].push_back({pass, 0, 1});
    refused(another_chunk, "rank 1: F0.1 names no micro-batch or chunk");
    refused(two_ranks("F0 I0 F1 B1 ", "F0 B0 F1 B1 ", 2), "rank 0: micro-batch 0 goes through chunk 0 as \"FI\"");
    Schedule one_list = two_ranks("F0 B0 ", "F0 B0 ", 1);
    one_list.ranks.pop_back();
    refused(one_list, "1 lists for 2 ranks");

    // Rank 0 wants a gradient back before it begins with the second micro-batch; rank 1 wants both first.
    const std::string cycle = deadlock(two_ranks("F0 B0 F1 B1 ", "F0 F1 B0 B1 ", 2), Sends::posted);
    INFO(cycle);
    EXPECT(cycle ==
           "rank 0 at B0 waits for the gradient of micro-batch 0 from rank 1; "
           "rank 1 at F1 waits for activations of micro-batch 1 from rank 0");
    // A rank that ends without sending what another waits for.
    EXPECT(deadlock(two_ranks("F0 B0 F1 B1 ", "F0 B0 F1 ", 2), Sends::posted) ==
           "rank 0 at B1 waits for the gradient of micro-batch 1 from rank 1; rank 1 has ended");
    EXPECT_CHECK_FAILS(simulate(two_ranks("F0 B0 F1 B1 ", "F0 F1 B0 B1 ", 2), equal_costs(two_ranks("", "", 1))));
}

TEST_CASE("sends that wait until they are received: 1F1B hangs on two ranks and more, naive and GPipe do not") {
    const std::string cycle = deadlock(make_schedule("1f1b", 2, 4), Sends::blocking);
    INFO(cycle);
    EXPECT(cycle ==
           "rank 0 at F1 sends activations of micro-batch 1 to rank 1; "
           "rank 1 at B0 sends the gradient of micro-batch 0 to rank 0");
    for (int64_t p = 2; p <= 8; ++p)
        for (int64_t m = 2; m <= 9; ++m) {
            EXPECT(deadlock(make_schedule("naive", p, m), Sends::blocking) == "");
            EXPECT(deadlock(make_schedule("gpipe", p, m), Sends::blocking) == "");
            EXPECT(deadlock(make_schedule("1f1b", p, m), Sends::blocking) != "");
            EXPECT(deadlock(make_schedule("zero-bubble", p, m), Sends::blocking) != "");
            EXPECT(deadlock(make_schedule("zb-v", p, m), Sends::blocking) != "");
        }
}

// The same question answered another way: of all ranks that can go on, one after another is chosen at random; a state
// from which none can is a deadlock. Synchronous: the sender stays at its send until the receiver is at the receive.
bool ends(const Schedule& s, bool synchronous, uint64_t key) {
    struct Event {
        int kind;  // 0 receive, 1 send
        std::tuple<bool, int64_t, int64_t> message;
        int64_t peer;
    };
    std::vector<std::deque<Event>> todo(size_t(s.stages));
    for (int64_t rank = 0; rank < s.stages; ++rank)
        for (const Step& step : s.ranks[size_t(rank)]) {
            if (step.pass == Pass::backward_weight) continue;
            const bool forward = step.pass == Pass::forward;
            const int64_t stage = s.stage_index(rank, step.chunk), from = stage + (forward ? -1 : 1),
                          to = stage + (forward ? 1 : -1);
            if (from >= 0 && from < s.stage_count())
                todo[size_t(rank)].push_back({0, {forward, step.micro_batch, from}, s.rank_of(from)});
            if (to >= 0 && to < s.stage_count())
                todo[size_t(rank)].push_back({1, {forward, step.micro_batch, stage}, s.rank_of(to)});
        }
    std::set<std::tuple<bool, int64_t, int64_t>> sent;
    for (uint64_t turn = 0;; ++turn) {
        std::vector<int64_t> able;
        for (int64_t rank = 0; rank < s.stages; ++rank) {
            const auto& mine = todo[size_t(rank)];
            if (mine.empty()) continue;
            const Event& event = mine.front();
            const auto& theirs = todo[size_t(event.peer)];
            if (event.kind == 0
                    ? sent.contains(event.message)
                    : !synchronous || event.peer == rank ||
                          (!theirs.empty() && theirs.front().kind == 0 && theirs.front().message == event.message))
                able.push_back(rank);
        }
        if (able.empty()) break;
        auto& mine = todo[size_t(able[random_bits(key, turn) % able.size()])];
        if (mine.front().kind == 1) sent.insert(mine.front().message);
        mine.pop_front();
    }
    return std::all_of(todo.begin(), todo.end(), [](const auto& rest) { return rest.empty(); });
}

TEST_CASE("random broken schedules: the checks find what is wrong, and both kinds of deadlock, and nothing else") {
    int64_t incomplete_ones = 0, posted = 0, blocking = 0, good = 0;
    for (uint64_t number = 0; number < 4000; ++number) {
        auto below = [number, counter = uint64_t(0)](size_t n) mutable {
            return size_t(random_bits(number, counter++) % n);
        };
        const auto& generators = schedule_generators();
        const ScheduleGenerator& generator = generators[below(generators.size())];
        const int64_t p = 2 + int64_t(below(3)), m = 2 * p * (1 + int64_t(below(2)));
        Schedule schedule = make_schedule(generator.name, p, m);
        auto& list = schedule.ranks[below(size_t(p))];
        const std::vector<Step> before = list;
        const size_t at = below(list.size()), other = below(list.size());
        switch (below(4)) {
            case 0: std::swap(list[at], list[other]); break;
            case 1:  // a step moves
                list.erase(list.begin() + int64_t(at));
                list.insert(list.begin() + int64_t(other < list.size() ? other : 0), before[at]);
                break;
            case 2: list.erase(list.begin() + int64_t(at)); break;
            case 3: list[at] = before[other]; break;
        }
        INFO(number, ": ", generator.name, ", ", p, " ranks, ", m, " micro-batches");
        // Each micro-batch and chunk: F, then B, or I and later W.
        std::map<std::pair<int64_t, int64_t>, std::string> letters;
        for (const Step& step : list) letters[{step.micro_batch, step.chunk}] += letter_of(step.pass);
        const bool whole = int64_t(letters.size()) == m * schedule.chunks &&
                           std::all_of(letters.begin(), letters.end(),
                                       [](const auto& entry) { return entry.second == "FB" || entry.second == "FIW"; });
        EXPECT(incomplete(schedule).empty() == whole);
        if (!whole) {
            ++incomplete_ones;
            continue;
        }
        const bool buffered_ends = ends(schedule, false, number), synchronous_ends = ends(schedule, true, number);
        EXPECT(deadlock(schedule, Sends::posted).empty() == buffered_ends);
        EXPECT(deadlock(schedule, Sends::blocking).empty() == synchronous_ends);
        ++(!buffered_ends ? posted : !synchronous_ends ? blocking : good);
    }
    INFO(incomplete_ones, " incomplete, ", posted, " deadlock, ", blocking, " if synchronous, ", good, " end");
    EXPECT((incomplete_ones > 500 && posted > 100 && blocking > 300 && good > 20));
}

TEST_CASE("deadlock inside one rank: a stage before the one that feeds it") {
    Schedule schedule = parse_schedule("by hand", "placement: v\nF0 F0.1 B0.1 B0\nF0.1 F0 B0.1 B0\n");
    EXPECT(incomplete(schedule) == "");
    for (const Sends sends : {Sends::posted, Sends::blocking}) {
        const std::string text = deadlock(schedule, sends);
        INFO(text);
        EXPECT(text.find("rank 1 at F0.1 waits for activations of micro-batch 0 from a later step of its own") !=
               std::string::npos);
    }
}

TEST_CASE("a schedule in a file: every schedule comes back as it was, and is drawn and simulated alike") {
    for_each_schedule([](const Schedule& schedule) {
        const Schedule again = parse_schedule(schedule.name, schedule_text(schedule));
        EXPECT((again.ranks == schedule.ranks && again.placement == schedule.placement));
        EXPECT((again.stages == schedule.stages && again.micro_batches == schedule.micro_batches));
        EXPECT(again.chunks == schedule.chunks);
    });
    // A placement that is neither; comments, empty lines, spaces and line ends of other systems.
    const Schedule placed =
        parse_schedule("x", "# a\n\n stages: 1 2 / 0 3 # b\r\n\tF0 F0.1  B0.1 B0\r\nF0 F0.1 I0.1 W0.1 B0 #c");
    EXPECT(placed.placement.stage == std::vector<std::vector<int64_t>>{{1, 2}, {0, 3}});
    EXPECT(placed.rank_of(0) == 1);
    EXPECT(incomplete(placed) == "");
    EXPECT(deadlock(placed, Sends::blocking) == "");
    EXPECT(parse_schedule("x", schedule_text(placed)).placement == placed.placement);
    EXPECT(parse_schedule("x", schedule_text(placed)).ranks == placed.ranks);
}

TEST_CASE("a typo in a file: file, line and word, and what would work") {
    const auto read = [](const std::string& text) { return parse_schedule("my.txt", text); };
    EXPECT_USAGE_ERROR(read("F0 B0\n# two\n\nF0 G0 B0\n"), "my.txt, line 4, word 2 \"G0\": is no step (F, B, I or W");
    for (const char* word : {"f0", "F", "F-1", "F01", "F1.", "F.1", "F1.x", "F1.01", "F1,", "FF1", "F1.1.1", "F1e1",
                             "0", "F9999999999", "F1/", "\xff\xfe", "."})
        EXPECT_USAGE_ERROR(read(fmt::format("F0 F1 B0 B1\nF0 B0 {} B1\n", word)),
                           fmt::format("my.txt, line 2, word 3 \"{}\": ", word).c_str());
    EXPECT_USAGE_ERROR(read("F0 B0 F999999999 B1\n"), "line 1, word 3 \"F999999999\": a rank of 4 steps has no such");
    EXPECT_USAGE_ERROR(read("F0 B0 F0.7 B1\n"), "line 1, word 3 \"F0.7\": a rank of 4 steps has no such");
    EXPECT_USAGE_ERROR(read("F0 B0 F4 B1\n"), "line 1, word 3 \"F4\": a rank of 4 steps has no such");
    EXPECT_USAGE_ERROR(read("F0 B0 F99999999999999999999 B1\n"), "word 3 \"F99999999999999999999\": is no step");
    EXPECT_USAGE_ERROR(read(std::string(4, '\0') + std::string(100, 'x')),
                       ("word 1 \"????" + std::string(36, 'x') + "...\": is no step").c_str());
    EXPECT_USAGE_ERROR(read(""), "my.txt: has no line of steps");
    EXPECT_USAGE_ERROR(read("# only this\n"), "my.txt: has no line of steps");
    EXPECT_USAGE_ERROR(read("placement: v\n"), "my.txt: has no line of steps");
    EXPECT_USAGE_ERROR(read("placement: w\nF0 B0\n"), "line 1, word 2 \"w\": must be \"placement: loop\"");
    EXPECT_USAGE_ERROR(read("placement:\nF0 B0\n"), "line 1, word 1 \"placement:\": must be \"placement: loop\"");
    EXPECT_USAGE_ERROR(read("place: v\nF0 B0\n"), "line 1, word 1 \"place:\": must be \"placement: loop\"");
    EXPECT_USAGE_ERROR(read("placement: v\nF0 B0\n"), "a V has two chunks per rank; the steps name 1");
    EXPECT_USAGE_ERROR(read("placement: v\nplacement: v\nF0 B0\n"), "line 2, word 1 \"placement:\": a second line");
    EXPECT_USAGE_ERROR(read("F0 B0\nplacement: loop\n"), "line 2, word 1 \"placement:\": the placement comes before");
    const std::string two = "F0 F0.1 B0.1 B0\nF0 F0.1 B0.1 B0\n";
    EXPECT_USAGE_ERROR(read("stages: 0 3 / 1 4\n" + two),
                       "word 6 \"4\": must be a stage from 0 to 3 (2 ranks of 2 chunks)");
    EXPECT_USAGE_ERROR(read("stages: 0 3 / 1 3\n" + two), "word 6 \"3\": is there twice");
    EXPECT_USAGE_ERROR(read("stages: 3 0 / 1 2\n" + two), "word 3 \"0\": comes after a higher stage");
    EXPECT_USAGE_ERROR(read("stages: 0 3 1 2\n" + two), "word 4 \"1\": comes after a higher stage");
    EXPECT_USAGE_ERROR(read("stages: 0 1 2 3\n" + two), "lists 1 ranks; there are 2 lines of steps");
    EXPECT_USAGE_ERROR(read("stages: 0 1 3 / 2\n" + two), "has 3 stages for rank 0, which has 2 chunks");
    EXPECT_USAGE_ERROR(read("stages: 0 1 /\n" + two), "has 0 stages for rank 1");
}

// Rank 0 has the second stage and takes twice as long: F 2, I 3, W 1; rank 1: F 1, B 2. A message takes 1/2.
TEST_CASE("the tables of the program schedule: costs, a slow rank, CSV with every step, as worked out by hand") {
    const Schedule schedule = parse_schedule("by hand", "stages: 1 / 0\nF0 F1 I0 W0 I1 W1\nF0 F1 B0 B1\n");
    const SandboxCosts costs{1, 1.5, 0.5, 0.5, {{0, 4}, {0, 0.5}}};
    const Timeline once = simulate(schedule, costs.of(schedule));
    EXPECT(once.span_bubble() == 1 - 6.0 / 15);  // of rank 1, which has the longest span
    const auto rows = [](const Table& table) {   // without the names of the columns
        const std::string csv = table.csv();
        return csv.substr(csv.find('\n') + 1);
    };
    EXPECT(rows(ranks_table(schedule, once, costs)) ==
           "0,by hand,2,2,1,1,1.5,0.5,0.5,2,1,1.5,13.5,12,0.2,12,0,2,2\n"
           "1,by hand,2,2,1,1,1.5,0.5,0.5,1,0,0,15,6,0.6,15,0.6,2,2\n");
    EXPECT(rows(spans_table(schedule, once)) ==
           "0,1,F0,F,0,0,1.5,3.5,1\n0,1,F1,F,1,0,3.5,5.5,2\n0,1,I0,I,0,0,5.5,8.5,2\n"
           "0,1,W0,W,0,0,8.5,9.5,2\n0,1,I1,I,1,0,9.5,12.5,1\n0,1,W1,W,1,0,12.5,13.5,1\n"
           "1,0,F0,F,0,0,0,1,1\n1,0,F1,F,1,0,1,2,2\n1,0,B0,B,0,0,9,11,2\n1,0,B1,B,1,0,13,15,1\n");
    const auto has = [](const Table& table, const std::string& pattern) {
        INFO(table.text());
        EXPECT(std::regex_search(table.text(), std::regex(pattern)));
    };
    has(steps_table(schedule, costs, 2), "wait for the last[^\n]* 30 +15 +15 +40.0%");
    const Schedule v = make_schedule("zb-v", 2, 4);  // chunks are halves
    has(ranks_table(v, simulate(v, equal_costs(v)), {}), "\n1 +1 2 [^\n]* 4 +2\n");
    // Rank 0 of 1F1B has the most in flight; the formulas are for F = I = W without hops and slow ranks.
    has(comparison_table(nullptr, 4, 8, {}), "\n1f1b +33 +27.3% +27.3% +27.3% +27.3% +4 +4 +deadlock");
    for (const SandboxCosts& other :
         {SandboxCosts{1, 1, 2}, SandboxCosts{2, 1, 1}, SandboxCosts{1, 1, 1, 0.5}, SandboxCosts{1, 1, 1, 0, {{3, 2}}}})
        has(comparison_table(nullptr, 4, 8, other), "\n1f1b +[0-9.]+ +[0-9.]+% +- +[0-9.]+% +- +4 +4 +deadlock");
}

TEST_CASE(
    "consecutive training steps: the drain of 1F1B is filled by the next warm-up only as far as its rank is free") {
    const Schedule schedule = make_schedule("1f1b", 4, 8), three = consecutive(schedule, 3);
    EXPECT(three.micro_batches == 24);
    EXPECT(incomplete(three) == "");
    const auto total = [&](int64_t steps) {
        return simulate(consecutive(schedule, steps), equal_costs(schedule)).total();
    };
    EXPECT(total(1) == 33);
    // Rank 0 ends last and begins first: nothing is gained on it.
    EXPECT(total(3) == 99);
    EXPECT(simulate(consecutive(make_schedule("zb-v", 4, 8), 1), equal_costs(make_schedule("zb-v", 4, 8))).total() ==
           25.5);
}

TEST_CASE("an unknown schedule, and one that this number of micro-batches does not allow, are usage errors") {
    EXPECT_USAGE_ERROR(make_schedule("2f2b", 4, 8), "--pipeline 2f2b: unknown; must be one of naive gpipe 1f1b");
    EXPECT_USAGE_ERROR(make_schedule("interleaved", 4, 6, 2),
                       "6 micro-batches are not divisible by --pp 4 (try 4 or 8)");
    EXPECT_USAGE_ERROR(make_schedule("interleaved", 4, 3, 2), "3 micro-batches are not divisible by --pp 4 (try 4)");
    EXPECT_USAGE_ERROR(make_schedule("dualpipe-v", 4, 7),
                       "--pipeline dualpipe-v: 7 micro-batches are fewer than 8 on --pp 4 (try 8, or zb-v)");
}

TEST_CASE("a drawing for other programs: every step once, in microseconds") {
    const Schedule schedule = make_schedule("interleaved", 2, 4, 2);
    const auto trace = chrome_trace({{"file:\xe9", simulate(schedule, equal_costs(schedule))}});  // not UTF-8
    EXPECT(trace.find("\"name\":\"F0.1\",\"pid\":0,\"tid\":0,\"ts\":1000000.0,\"dur\":500000.0") != std::string::npos);
}
