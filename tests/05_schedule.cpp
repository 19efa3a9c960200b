// Schedules as data: complete, free of deadlock, in flight as the formula says, simulated to the formula's bubble.
#include <map>

#include "05_pipeline/simulate.h"
#include "tests/support.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// Every schedule of up to 8 stages and up to 17 micro-batches.
void for_each_schedule(const std::function<void(const Schedule&)>& body) {
    for (const ScheduleGenerator& generator : schedule_generators())
        for (int64_t p = 1; p <= 8; ++p)
            for (int64_t m = 1; m <= 17; ++m)
                for (int64_t v = 1; v <= 3; ++v) {
                    if (generator.virtual_stages ? m % p != 0 || p == 1 : v > 1) continue;
                    const Schedule schedule = make_schedule(generator.name, p, m, v);
                    INFO(generator.name, ", ", p, " stages, ", m, " micro-batches, ", v, " chunks");
                    body(schedule);
                }
}

Schedule two_ranks(const std::string& first, const std::string& second, int64_t m) {  // "F0 B0 F1"
    Schedule schedule{"by hand", 2, m, 1, {}};
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
        {"zero-bubble", 8, 8, 1, 7. / 31, {8, 8, 8, 8, 8, 8, 8, 8}},
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
        for (const auto& steps : schedule.ranks) {
            int64_t next = 0;
            for (const Step& step : steps)
                if (step.pass == Pass::backward_weight) EXPECT(step.micro_batch == next++);
        }
    });
}

TEST_CASE("the simulator gives the formula's bubble, to 1e-9, for equal stages, B = 2F and messages in no time") {
    for_each_schedule([](const Schedule& schedule) {
        if (schedule.name == "zero-bubble" && schedule.micro_batches < schedule.stages) return;  // as its formula says
        const Timeline timeline = simulate(schedule, equal_costs(schedule));
        const double m = double(schedule.micro_batches);
        EXPECT(std::abs(timeline.bubble() - bubble_formula(schedule)) <= 1e-9);
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
    EXPECT(drawn.find("rank 0  |F0F1..............B0----B1----|") != std::string::npos);
    EXPECT(drawn.find("rank 1  |...F0  F1  B0----B1----.......|") != std::string::npos);
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
                    ready = std::max(ready, ends.at({forward, span.step.micro_batch, from}) + 0.37 - 1e-12);
                if (wrong.empty() && span.begin < ready)
                    wrong = fmt::format("rank {} at {}", rank, to_string(span.step));
                last = span.end;
            }
        }
        EXPECT(wrong == "");
    });
}

TEST_CASE("a schedule with an error is refused, and the checker says where") {
    const auto refused = [](const Schedule& schedule, const std::string& part) {
        const std::string text = incomplete(schedule);
        INFO(text);
        EXPECT(text.find(part) != std::string::npos);
    };
    refused(two_ranks("F0 B0 F1 B1 ", "F0 B0 F1 ", 2), "rank 1: micro-batch 1 goes through chunk 0 as \"F\"");
    refused(two_ranks("F0 B0 F1 B1 ", "B0 F0 F1 B1 ", 2), "rank 1: B0 comes after \"\", not \"F\"");
    refused(two_ranks("F0 F0 B0 F1 B1 ", "F0 B0 F1 B1 ", 2), "rank 0: F0 comes after \"F\", not \"\"");
    refused(two_ranks("F0 B0 F1 W1 I1 ", "F0 B0 F1 B1 ", 2), "rank 0: W1 comes after \"F\", not \"FI\"");
    refused(two_ranks("F0 B0 F1 B1 F2 ", "F0 B0 F1 B1 ", 2), "rank 0: F2 names no micro-batch");
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
        }
}

TEST_CASE("an unknown schedule, and one that this number of micro-batches does not allow, are usage errors") {
    EXPECT_USAGE_ERROR(make_schedule("2f2b", 4, 8), "--pipeline 2f2b: unknown; must be one of naive gpipe 1f1b");
    EXPECT_USAGE_ERROR(make_schedule("interleaved", 4, 6, 2),
                       "6 micro-batches are not divisible by --pp 4 (try 4 or 8)");
    EXPECT_USAGE_ERROR(make_schedule("interleaved", 4, 3, 2), "3 micro-batches are not divisible by --pp 4 (try 4)");
}

TEST_CASE("drawings for other programs: every step once, in seconds and in microseconds") {
    const Schedule schedule = make_schedule("interleaved", 2, 4, 2);
    const auto json = timelines_json({{"a", simulate(schedule, equal_costs(schedule))}});
    EXPECT(json.find("{\"step\":\"F0.1\",\"begin\":1.0,\"end\":1.5}") != std::string::npos);
    const auto trace = chrome_trace({{"a", simulate(schedule, equal_costs(schedule))}});
    EXPECT(trace.find("\"name\":\"F0.1\",\"pid\":0,\"tid\":0,\"ts\":1000000.0,\"dur\":500000.0") != std::string::npos);
}
