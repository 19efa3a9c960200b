// Schedules as data: complete, free of deadlock, in flight as the formula says, simulated to the formula's bubble.
#include <array>
#include <deque>
#include <map>
#include <regex>
#include <set>

#include "tests/schedules.h"

using namespace train70b;
using namespace train70b::test;

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
