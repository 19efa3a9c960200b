// Grades the lab zero-bubble-w.
#include "05_pipeline/complete/schedule_simulation.h"
#include "tests/labs.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr int64_t kRanks = 4, kMicroBatches = 8;

// The first thing that `wrong` finds in the schedules of up to 6 ranks and 13 micro-batches.
std::string first_wrong(const std::function<std::string(const Schedule&)>& wrong) {
    for (int64_t p = 1; p <= 6; ++p)
        for (int64_t m = 1; m <= 2 * p + 1; ++m)
            if (const std::string text = wrong(make_schedule("zero-bubble", p, m)); !text.empty())
                return fmt::format("{} ranks, {} micro-batches: {}", p, m, text);
    return "";
}

bool has_every_forward_and_input(const Schedule& s) {  // what other ranks wait for
    for (const auto& steps : s.ranks) {
        int64_t forwards = 0, inputs = 0;
        for (const Step& step : steps)
            forwards += step.pass == Pass::forward, inputs += step.pass == Pass::backward_input;
        if (forwards != s.micro_batches || inputs != s.micro_batches) return false;
    }
    return deadlock(s, Sends::posted).empty();
}

bool weights_at_once(const Schedule& s) {
    for (const auto& steps : s.ranks)
        for (size_t i = 0; i < steps.size(); ++i)
            if (steps[i].pass == Pass::backward_weight && (i == 0 || steps[i - 1].pass != Pass::backward_input))
                return false;
    return true;
}

}  // namespace

TEST_CASE("lab: complete, and all ranks reach the end") {
    expect_none_wrong(first_wrong([](const Schedule& schedule) {
        const std::string text = incomplete(schedule);
        return text.empty() ? deadlock(schedule, Sends::posted) : text;
    }));
}

TEST_CASE("lab: W in order, after I") {
    expect_none_wrong(first_wrong([](const Schedule& schedule) -> std::string {
        for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
            int64_t inputs = 0, weights = 0;
            for (const Step& step : schedule.ranks[rank]) {
                inputs += step.pass == Pass::backward_input;
                if (step.pass != Pass::backward_weight) continue;
                if (step.micro_batch != weights++)
                    return fmt::format("rank {}: {} is not the next W", rank, to_string(step));
                if (step.micro_batch >= inputs)
                    return fmt::format("rank {}: {} before I{}", rank, to_string(step), step.micro_batch);
            }
            if (weights == 0 && schedule.micro_batches >= schedule.stages) return fmt::format("rank {} has no W", rank);
        }
        return "";
    }));
}

TEST_CASE("lab: micro-batches in flight") {
    const Schedule schedule = make_schedule("zero-bubble", kRanks, kMicroBatches);
    int64_t worst = 0;
    for (int64_t rank = 0; rank < kRanks; ++rank)
        if (in_flight(schedule, rank) > in_flight(schedule, worst)) worst = rank;
    const int64_t got = in_flight(schedule, worst);
    figure(fmt::format("most in flight, on rank {} of {}, {} micro-batches", worst, kRanks, kMicroBatches), got,
           std::min(kMicroBatches, kRanks), "", "min(m, p)",
           got == kMicroBatches ? "No W before the last I: activations of all m micro-batches are kept."
           : worst == 0         ? "Rank 0 holds p micro-batches already in 1F1B: it has no room for W that are late."
                                : "");
}

TEST_CASE("lab: the longest span of a rank") {
    const Schedule schedule = make_schedule("zero-bubble", kRanks, kMicroBatches);
    if (!has_every_forward_and_input(schedule)) return expect_none_wrong("F and I do not reach the end");
    const double span = simulate(schedule, equal_costs(schedule)).longest_span();
    const double ideal = 3.0 * kMicroBatches;
    figure(fmt::format("longest span of a rank, {} ranks, {} micro-batches", kRanks, kMicroBatches), span,
           ideal + double(kRanks - 1), "passes", "3 m + p - 1",
           weights_at_once(schedule) ? "W right after I: that is 1F1B with I sent earlier. Where the ranks wait for a "
                                       "gradient in the drain, no W is left to run."
           : span < ideal            ? "Less than the work of a rank: W are missing."
                                     : "");
}
