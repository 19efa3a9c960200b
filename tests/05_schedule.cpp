// Schedules as data: complete, free of deadlock, in flight as the formula says, simulated to the formula's bubble.
#include <map>

#include "05_pipeline/simulate.h"
#include "tests/support.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr const char* kSchedules[] = {"naive", "gpipe", "1f1b", "interleaved", "zero-bubble"};

// Every schedule of up to 8 stages and up to 17 micro-batches.
void for_each_schedule(const std::function<void(const Schedule&)>& body) {
    for (const std::string name : kSchedules)
        for (int64_t p = 1; p <= 8; ++p)
            for (int64_t m = 1; m <= 17; ++m)
                for (int64_t v = 1; v <= 3; ++v) {
                    if (name == "interleaved" ? m % p != 0 || p == 1 : v > 1) continue;
                    const Schedule schedule = make_schedule(name, p, m, v);
                    INFO(name, ", ", p, " stages, ", m, " micro-batches, ", v, " chunks");
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
        for (int64_t rank = 0; rank < schedule.stages; ++rank)
            EXPECT(in_flight(schedule, rank) == in_flight_formula(schedule, rank));
    });
}

TEST_CASE("weight halves run in the order of micro-batches") {
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
        const double p = double(schedule.stages), m = double(schedule.micro_batches), v = double(schedule.chunks);
        const std::map<std::string, double> expected = {{"naive", (p - 1) / p},
                                                        {"gpipe", (p - 1) / (m + p - 1)},
                                                        {"1f1b", (p - 1) / (m + p - 1)},
                                                        {"interleaved", (p - 1) / (v * m + p - 1)},
                                                        {"zero-bubble", (p - 1) / (3 * m + p - 1)}};
        EXPECT(std::abs(timeline.bubble() - expected.at(schedule.name)) <= 1e-9);
        EXPECT(std::abs(bubble_formula(schedule) - expected.at(schedule.name)) <= 1e-9);
        // The whole step: all the work of a rank, and the bubble.
        EXPECT(std::abs(timeline.total() * (1 - timeline.bubble()) - 3 * m) <= 1e-9 * m);
    });
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
                          schedule.part(rank, span.step.chunk)}] = span.end;
        bool right = true;
        for (int64_t rank = 0; rank < schedule.stages; ++rank) {
            double last = 0;
            for (const auto& span : timeline.ranks[size_t(rank)]) {
                const bool forward = span.step.pass == Pass::forward;
                const int64_t part = schedule.part(rank, span.step.chunk), from = forward ? part - 1 : part + 1;
                right = right && span.begin >= last;
                if (span.step.pass != Pass::backward_weight && from >= 0 && from < schedule.parts())
                    right = right && span.begin >= ends.at({forward, span.step.micro_batch, from}) + 0.37 - 1e-12;
                last = span.end;
            }
        }
        EXPECT(right);
    });
}

TEST_CASE("what is broken by hand is refused, and the checker says where") {
    const auto refused = [](const Schedule& schedule, const std::string& part) {
        const std::string text = incomplete(schedule);
        INFO(text);
        EXPECT(text.find(part) != std::string::npos);
    };
    refused(two_ranks("F0 B0 F1 B1 ", "F0 B0 F1 ", 2), "rank 1: micro-batch 1 goes through chunk 0 as \"F\"");
    refused(two_ranks("F0 B0 F1 B1 ", "B0 F0 F1 B1 ", 2), "rank 1: B0 comes after \"\", not \"F\"");
    refused(two_ranks("F0 F0 B0 F1 B1 ", "F0 B0 F1 B1 ", 2), "rank 0: F0 comes after \"F\", not \"\"");
    refused(two_ranks("F0 B0 F1 W1 I1 ", "F0 B0 F1 B1 ", 2), "rank 0: W1 comes after \"F\", not \"FI\"");
    refused(two_ranks("F0 B0 F1 B1 F2 ", "F0 B0 F1 B1 ", 2), "rank 0: F2 is of no micro-batch");
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

TEST_CASE("sends that wait until they are received: 1F1B stands still on two ranks and more, naive and GPipe do not") {
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

TEST_CASE("interleaved wants whole groups of micro-batches") {
    EXPECT_USAGE_ERROR(make_schedule("interleaved", 4, 6, 2), "6 micro-batches are no multiple of --pp 4; 8 would be");
}

TEST_CASE("drawings for other programs: every step once, in seconds and in microseconds") {
    const Schedule schedule = make_schedule("interleaved", 2, 4, 2);
    const auto json = timelines_json({{"a", simulate(schedule, equal_costs(schedule))}});
    EXPECT(json.find("{\"step\":\"F0.1\",\"begin\":1.0,\"end\":1.5}") != std::string::npos);
    const auto trace = chrome_trace({{"a", simulate(schedule, equal_costs(schedule))}});
    EXPECT(trace.find("\"name\":\"F0.1\",\"pid\":0,\"tid\":0,\"ts\":1000000.0,\"dur\":500000.0") != std::string::npos);
}
