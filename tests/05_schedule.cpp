// Schedules as data: complete, free of deadlock, in flight as the formula says, simulated to the formula's bubble.
#include <array>
#include <deque>
#include <map>
#include <regex>
#include <set>

#include "05_pipeline/schedule_file.h"
#include "05_pipeline/schedule_report.h"
#include "05_pipeline/simulate.h"
#include "tests/support.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// Every schedule of up to 8 stages and up to 17 micro-batches, as far as there is one.
void for_each_schedule(const std::function<void(const Schedule&)>& body) {
    for (const ScheduleGenerator& generator : schedule_generators())
        for (int64_t p = 1; p <= 8; ++p)
            for (int64_t m = 1; m <= 17; ++m)
                for (int64_t v = 1; v <= 3; ++v) {
                    const bool loop = generator.chunks == ScheduleGenerator::Chunks::loop;
                    if (loop ? p == 1 : v != generator.default_chunks()) continue;
                    if (!generator.problem(p, m).empty()) continue;
                    const Schedule schedule = make_schedule(generator.name, p, m, v);
                    INFO(generator.name, ", ", p, " stages, ", m, " micro-batches, ", v, " chunks");
                    body(schedule);
                }
}

Schedule two_ranks(const std::string& first, const std::string& second, int64_t m) {  // "F0 B0 F1"
    Schedule schedule{"by hand", 2, m, 1, {}, loop_placement(2, 1)};
    for (const std::string& text : {first, second}) {
        auto& steps = schedule.ranks.emplace_back();
        for (size_t i = 0; i < text.size(); i += 3)
            steps.push_back({Pass(std::string("FBIW").find(text[i])), text[i + 1] - '0', 0});
    }
    return schedule;
}

}  // namespace

TEST_CASE("every schedule is complete, ends, and has in flight what its formula says") {
    for_each_schedule([](const Schedule& schedule) {
        EXPECT(incomplete(schedule) == "");
        EXPECT(deadlock(schedule, Sends::posted) == "");
        for (int64_t rank = 0; rank < schedule.stages; ++rank) {
            INFO("rank ", rank);
            EXPECT(in_flight(schedule, rank) == in_flight_formula(schedule, rank));
        }
    });
}

// The formulas of the papers, worked out. Bubble of GPipe (Huang et al. 2019, section 2.3) and of 1F1B (p-1)/(m+p-1);
// interleaved: v times smaller against the ideal time (Narayanan et al. 2021, section 2.2); ZB-H1: (p-1)(F + I - W)
// idle beside 3m F of work (Qi et al. 2023, table 2).
TEST_CASE("bubble and micro-batches in flight: the papers' numbers") {
    struct Expected {
        const char* name;
        int64_t p, m, v;
        double bubble;
        std::vector<int64_t> in_flight;  // by rank
    };
    const std::vector<Expected> expected = {
        {"naive", 2, 4, 1, 1. / 2, {1, 1}},
        {"naive", 4, 8, 1, 3. / 4, {1, 1, 1, 1}},
        {"gpipe", 2, 4, 1, 1. / 5, {4, 4}},
        {"gpipe", 4, 8, 1, 3. / 11, {8, 8, 8, 8}},
        {"gpipe", 8, 16, 1, 7. / 23, {16, 16, 16, 16, 16, 16, 16, 16}},
        {"1f1b", 1, 3, 1, 0, {1}},
        {"1f1b", 2, 4, 1, 1. / 5, {2, 1}},
        {"1f1b", 4, 8, 1, 3. / 11, {4, 3, 2, 1}},
        {"1f1b", 8, 4, 1, 7. / 11, {4, 4, 4, 4, 4, 3, 2, 1}},
        {"interleaved", 2, 4, 2, 1. / 9, {5, 3}},
        {"interleaved", 4, 8, 1, 3. / 11, {7, 5, 3, 1}},
        {"interleaved", 4, 8, 2, 3. / 19, {11, 9, 7, 5}},
        {"interleaved", 4, 4, 3, 1. / 5, {12, 12, 11, 9}},
        {"zero-bubble", 2, 4, 1, 1. / 13, {2, 2}},
        {"zero-bubble", 4, 8, 1, 1. / 9, {4, 4, 4, 4}},
        {"zero-bubble", 4, 16, 1, 1. / 17, {4, 4, 4, 4}},
        {"zero-bubble", 4, 2, 1, 5. / 11, {2, 2, 2, 2}},
        {"zero-bubble", 8, 8, 1, 7. / 31, {8, 8, 8, 8, 8, 8, 8, 8}},
        {"zb-v", 2, 4, 2, 1. / 25, {4, 4}},
        {"zb-v", 4, 8, 2, 3. / 51, {8, 8, 8, 8}},
        {"zb-v", 4, 4, 2, 6. / 30, {5, 6, 7, 8}},
        {"zb-v", 2, 1, 2, 4. / 10, {2, 2}},
        {"dualpipe-v", 2, 4, 2, 1. / 25, {5, 5}},
        {"dualpipe-v", 4, 8, 2, 3. / 51, {9, 9, 9, 9}},
        {"dualpipe-v", 4, 16, 2, 3. / 99, {9, 9, 9, 9}},
    };
    for (const ScheduleGenerator& generator : schedule_generators())
        EXPECT(
            std::any_of(expected.begin(), expected.end(), [&](const Expected& e) { return e.name == generator.name; }));
    for (const Expected& e : expected) {
        const Schedule schedule = make_schedule(e.name, e.p, e.m, e.v);
        INFO(std::string(e.name), ", ", e.p, " stages, ", e.m, " micro-batches, ", e.v, " chunks");
        EXPECT(std::abs(bubble_formula(schedule) - e.bubble) <= 1e-12);
        EXPECT(std::abs(simulate(schedule, equal_costs(schedule)).bubble() - e.bubble) <= 1e-12);
        for (int64_t rank = 0; rank < e.p; ++rank) {
            INFO("rank ", rank);
            EXPECT(in_flight_formula(schedule, rank) == e.in_flight[size_t(rank)]);
        }
    }
}

TEST_CASE("weight gradients run in the order of micro-batches") {
    for_each_schedule([](const Schedule& schedule) {
        std::string wrong;  // the first step out of order
        for (const auto& steps : schedule.ranks) {
            std::vector<int64_t> next(size_t(schedule.chunks));
            for (const Step& step : steps)
                if (step.pass == Pass::backward_weight || step.pass == Pass::backward)
                    if (step.micro_batch != next[size_t(step.chunk)]++ && wrong.empty()) wrong = to_string(step);
        }
        EXPECT(wrong == "");
    });
}

TEST_CASE("placements: every stage is on one rank; loops go round, a V turns at the last rank") {
    for_each_schedule([](const Schedule& s) {
        const bool v = find_schedule(s.name).chunks == ScheduleGenerator::Chunks::v;
        for (int64_t rank = 0; rank < s.stages; ++rank)
            for (int64_t chunk = 0; chunk < s.chunks; ++chunk) {
                const int64_t stage = s.stage_index(rank, chunk);
                EXPECT(s.rank_of(stage) == rank);
                EXPECT(stage == (v && chunk == 1 ? 2 * s.stages - 1 - rank : chunk * s.stages + rank));
            }
    });
    EXPECT_CHECK_FAILS(placement_of({{0, 2}, {1, 2}}));
    EXPECT_CHECK_FAILS(placement_of({{0, 4}, {1, 2}}));
}

TEST_CASE("the simulator gives the formula's bubble, to 1e-9, for equal stages, B = 2F and messages in no time") {
    for_each_schedule([](const Schedule& schedule) {
        const Timeline timeline = simulate(schedule, equal_costs(schedule));
        const double m = double(schedule.micro_batches);
        EXPECT(std::abs(timeline.bubble() - bubble_formula(schedule)) <= 1e-9);
        EXPECT(std::abs(timeline.span_bubble() - span_bubble_formula(schedule)) <= 1e-9);
        // The whole step: all the work of a rank, and the bubble.
        EXPECT(std::abs(timeline.total() * (1 - timeline.bubble()) - 3 * m) <= 1e-9 * m);
    });
}

// ZB-H2 on two ranks (Qi et al. 2023, section 2): 2p - 1 = 3 micro-batches in flight on rank 0. First begin to last end
// over all ranks is the same as with ZB-H1, because rank 1 cannot begin before rank 0; but no rank waits between its
// own steps.
TEST_CASE("the longest span of a rank: 3 m F for ZB-H2, more for 1F1B; the total does not tell ZB-H2 from ZB-H1") {
    const Schedule h2 = two_ranks("F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3 ", "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3 ", 4);
    EXPECT(incomplete(h2) == "");
    EXPECT(in_flight(h2, 0) == 3);
    const auto cost = [](const Schedule& schedule) { return simulate(schedule, equal_costs(schedule)); };
    EXPECT(cost(h2).longest_span() == 12);  // 4 micro-batches of F, I, W
    EXPECT(cost(h2).total() == 13);
    EXPECT(cost(make_schedule("zero-bubble", 2, 4)).total() == 13);
    EXPECT(cost(make_schedule("zero-bubble", 2, 4)).longest_span() == 13);
    EXPECT(cost(make_schedule("1f1b", 2, 4)).total() == 15);
    EXPECT(cost(make_schedule("1f1b", 2, 4)).longest_span() == 15);
    EXPECT(cost(make_schedule("naive", 1, 4)).longest_span() == 12);
}

TEST_CASE("zb-v and dualpipe-v on two ranks and four micro-batches, step by step") {
    EXPECT(schedule_text(make_schedule("zb-v", 2, 4)) ==
           "# zb-v: 2 ranks, 4 micro-batches\nplacement: v\n"
           "F0 F1 F2 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 F3 I0 W0 F2.1 I2.1 W2.1 I1 W1 F3.1 I3.1 W3.1 I2 W2 I3 W3\n"
           "F0 F0.1 F1 F1.1 I0.1 W0.1 F2 I0 W0 F2.1 I1.1 W1.1 F3 I1 W1 F3.1 I2.1 W2.1 I2 I3.1 I3 W2 W3.1 W3\n");
    EXPECT(schedule_text(make_schedule("dualpipe-v", 2, 4)) ==
           "# dualpipe-v: 2 ranks, 4 micro-batches\nplacement: v\n"
           "F0 F1 F2 F0.1 I0.1 W0.1 F1.1 F3 B1.1 F2.1 B0 B2.1 F3.1 B1 B3.1 I2 W2 I3 W3\n"
           "F0 F0.1 F1 F1.1 F2 B0.1 F2.1 B0 F3 B1.1 F3.1 B1 B2.1 B2 I3.1 I3 W3.1 W3\n");
}

// Qi et al. 2023, section 6: with F = I = W, no idle time and the memory of 1F1B, p micro-batches on every rank.
TEST_CASE(
    "zb-v: no rank idles between its own first and last step, from 2p - 1 micro-batches on; p of them in flight") {
    for (int64_t p = 1; p <= 16; ++p)
        for (int64_t m = 1; m <= 4 * p; ++m) {
            const Schedule schedule = make_schedule("zb-v", p, m);
            const Timeline timeline = simulate(schedule, equal_costs(schedule));
            INFO(p, " ranks, ", m, " micro-batches");
            for (int64_t rank = 0; rank < p; ++rank) {
                EXPECT(in_flight(schedule, rank) <= 2 * p);  // halves
                if (m >= 2 * p - 1) EXPECT(in_flight(schedule, rank) == 2 * p);
                if (m >= 2 * p - 1) EXPECT(timeline.span(rank) == 3.0 * double(m));
                if (m >= 2 * p - 1) EXPECT(timeline.ranks[size_t(rank)].front().begin == 0.5 * double(rank));
            }
            if (p > 1 && m < 2 * p - 1) EXPECT(timeline.longest_span() > 3.0 * double(m));
            // The next training step begins where this one leaves off.
            const Schedule steps = consecutive(schedule, 3);
            EXPECT(incomplete(steps) == "");
            EXPECT(deadlock(steps, Sends::posted) == "");
            if (m >= 2 * p - 1)
                EXPECT(simulate(steps, equal_costs(schedule)).total() == 9.0 * double(m) + 0.5 * double(p - 1));
        }
}

// The README of DualPipe: bubble (PP/2 - 1)(F&B + B - 3W) on PP/2 ranks, PP + 1 micro-batches of a chunk in flight. F&B
// is one step there: both outputs leave at its end. Here F&B are the neighbours "F of one chunk, B of the other".
double idle_of_pairs(const Schedule& s, double F, double I, double W, double F_and_B) {
    struct Piece {
        std::vector<Step> steps;
        double cost;
    };
    std::vector<std::vector<Piece>> ranks;
    for (const auto& list : s.ranks) {
        auto& pieces = ranks.emplace_back();
        for (size_t i = 0; i < list.size(); ++i) {
            const bool pair = i + 1 < list.size() && list[i].pass == Pass::forward &&
                              list[i + 1].pass == Pass::backward && list[i].chunk != list[i + 1].chunk;
            const double alone = list[i].pass == Pass::forward          ? F
                                 : list[i].pass == Pass::backward       ? I + W
                                 : list[i].pass == Pass::backward_input ? I
                                                                        : W;
            if (pair)
                pieces.push_back({{list[i], list[i + 1]}, F_and_B}), ++i;
            else
                pieces.push_back({{list[i]}, alone});
        }
    }
    std::map<std::tuple<bool, int64_t, int64_t>, double> done;
    std::vector<size_t> at(ranks.size());
    std::vector<double> now(ranks.size()), busy(ranks.size());
    for (bool moved = true; moved;) {
        moved = false;
        for (size_t rank = 0; rank < ranks.size(); ++rank)
            while (at[rank] < ranks[rank].size()) {
                const Piece& piece = ranks[rank][at[rank]];
                double begin = now[rank];
                bool ready = true;
                for (const Step& step : piece.steps) {
                    const bool forward = step.pass == Pass::forward;
                    const int64_t from = s.stage_index(int64_t(rank), step.chunk) + (forward ? -1 : 1);
                    if (step.pass == Pass::backward_weight || from < 0 || from == s.stage_count()) continue;
                    const auto input = done.find({forward, step.micro_batch, from});
                    if (input == done.end())
                        ready = false;
                    else
                        begin = std::max(begin, input->second);
                }
                if (!ready) break;
                now[rank] = begin + piece.cost;
                busy[rank] += piece.cost;
                for (const Step& step : piece.steps)
                    if (step.pass != Pass::backward_weight)
                        done[{step.pass == Pass::forward, step.micro_batch, s.stage_index(int64_t(rank), step.chunk)}] =
                            now[rank];
                ++at[rank];
                moved = true;
            }
    }
    double last = 0, most = 0;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
        REQUIRE(at[rank] == ranks[rank].size());
        last = std::max(last, now[rank]);
    }
    for (const double each : busy) most = std::max(most, last - each);
    return most;
}

TEST_CASE("dualpipe-v: the formula of its authors, where F&B is one step; half of it, where F sends before B begins") {
    for (int64_t p = 1; p <= 12; ++p)
        for (const int64_t m : {2 * p, 2 * p + 1, 3 * p, 4 * p}) {
            const Schedule schedule = make_schedule("dualpipe-v", p, m);
            INFO(p, " ranks, ", m, " micro-batches");
            for (const auto& [F, I, W, F_and_B] :
                 std::vector<std::array<double, 4>>{{1, 1, 1, 3}, {1, 1, 1, 2}, {2, 3, 2, 6}, {2, 2, 1, 5}})
                EXPECT(idle_of_pairs(schedule, F, I, W, F_and_B) == double(p - 1) * (F_and_B + (I + W) - 3 * W));
            const Timeline timeline = simulate(schedule, equal_costs(schedule));
            for (int64_t rank = 0; rank < p; ++rank) {
                EXPECT(in_flight(schedule, rank) == 2 * p + 1);
                EXPECT(timeline.total() - timeline.busy(rank) == 0.5 * double(p - 1));  // F of a chunk is 1/2
            }
        }
}

TEST_CASE("the simulator: steps follow one another, wait for what they need and for the hop, as drawn by hand") {
    const Schedule schedule = two_ranks("F0 F1 B0 B1 ", "F0 F1 B0 B1 ", 2);
    const Costs costs{
        [](int64_t rank, const Step& step) { return step.pass == Pass::forward ? (rank == 0 ? 1.0 : 2.0) : 3.0; }, 0.5};
    const Timeline t = simulate(schedule, costs);
    const double expected[2][4][2] = {{{0, 1}, {1, 2}, {9, 12}, {12, 15}},
                                      {{1.5, 3.5}, {3.5, 5.5}, {5.5, 8.5}, {8.5, 11.5}}};
    for (int rank = 0; rank < 2; ++rank)
        for (int i = 0; i < 4; ++i) {
            EXPECT(t.ranks[rank][i].begin == expected[rank][i][0]);
            EXPECT(t.ranks[rank][i].end == expected[rank][i][1]);
        }
    EXPECT(t.total() == 15);
    EXPECT(t.busy(0) == 8);
    EXPECT(std::abs(t.bubble() - (1 - (8.0 + 10.0) / 30)) <= 1e-12);
    const std::string drawn = ascii_gantt(t, 30);
    EXPECT(drawn.find("rank 0  |F0F1..............B0====B1====|") != std::string::npos);
    EXPECT(drawn.find("rank 1  |...F0==F1==B0====B1----.......|") != std::string::npos);
    EXPECT(drawn.find("|  idle 46.7%\n") != std::string::npos);  // 1 - 8/15
}

TEST_CASE("in a V the turn takes no message: one micro-batch on two ranks pays four hops") {
    const Schedule schedule = parse_schedule("by hand", "placement: v\nF0 F0.1 B0.1 B0\nF0 F0.1 B0.1 B0\n");
    EXPECT(simulate(schedule, equal_costs(schedule, 1, 1, 1, 0.25)).total() == 4 * 0.5 + 4 * 1 + 4 * 0.25);
}

TEST_CASE("a message takes its time: with hops 1F1B is slower, and nothing begins before its input is there") {
    for_each_schedule([](const Schedule& schedule) {
        const Costs costs = equal_costs(schedule, 1, 1.3, 0.9, 0.37);
        const Timeline timeline = simulate(schedule, costs);
        std::map<std::tuple<bool, int64_t, int64_t>, double> ends;
        for (int64_t rank = 0; rank < schedule.stages; ++rank)
            for (const auto& span : timeline.ranks[size_t(rank)])
                if (span.step.pass != Pass::backward_weight)
                    ends[{span.step.pass == Pass::forward, span.step.micro_batch,
                          schedule.stage_index(rank, span.step.chunk)}] = span.end;
        std::string wrong;  // the first step that begins too early
        for (int64_t rank = 0; rank < schedule.stages; ++rank) {
            double last = 0;
            for (const auto& span : timeline.ranks[size_t(rank)]) {
                const bool forward = span.step.pass == Pass::forward;
                const int64_t stage = schedule.stage_index(rank, span.step.chunk),
                              from = forward ? stage - 1 : stage + 1;
                double ready = last;
                if (span.step.pass != Pass::backward_weight && from >= 0 && from < schedule.stage_count())
                    ready = std::max(ready, ends.at({forward, span.step.micro_batch, from}) +
                                                (schedule.rank_of(from) == rank ? 0 : 0.37) - 1e-12);
                if (wrong.empty() && span.begin < ready)
                    wrong = fmt::format("rank {} at {}", rank, to_string(span.step));
                last = span.end;
            }
        }
        EXPECT(wrong == "");
        // The critical path: one step after another from 0 to the end, with a hop wherever it changes the rank.
        std::map<double, std::pair<int64_t, double>> path;  // by begin: rank, end
        for (int64_t rank = 0; rank < schedule.stages; ++rank)
            for (const auto& span : timeline.ranks[size_t(rank)])
                if (span.critical) path[span.begin] = {rank, span.end};
        double at = 0, gap = 0;
        int64_t on = 0;
        for (const auto& [begin, step] : path) {
            gap = std::max(gap, std::abs(begin - at - (step.first == on ? 0 : 0.37)));
            std::tie(on, at) = step;
        }
        EXPECT(gap <= 1e-9);
        EXPECT(at == timeline.total());
    });
}

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

TEST_CASE("drawings for other programs: every step once, in seconds and in microseconds") {
    const Schedule schedule = make_schedule("interleaved", 2, 4, 2);
    const auto json = timelines_json({{"a", simulate(schedule, equal_costs(schedule))}});
    EXPECT(json.find("{\"step\":\"F0.1\",\"begin\":1.0,\"end\":1.5}") != std::string::npos);
    const auto trace = chrome_trace({{"file:\xe9", simulate(schedule, equal_costs(schedule))}});  // not UTF-8
    EXPECT(trace.find("\"name\":\"F0.1\",\"pid\":0,\"tid\":0,\"ts\":1000000.0,\"dur\":500000.0") != std::string::npos);
}
