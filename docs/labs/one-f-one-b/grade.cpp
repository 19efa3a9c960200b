// Grades the lab one-f-one-b.
#include "05_pipeline/complete/schedule_simulation.h"
#include "tests/labs.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// What `wrong` finds first in the schedules of up to 6 ranks with these micro-batches.
std::string first_wrong(bool few, const std::function<std::string(const Schedule&)>& wrong) {
    for (int64_t p = 1; p <= 6; ++p)
        for (int64_t m = few ? 1 : p; m <= (few ? p - 1 : 2 * p + 1); ++m)
            if (const std::string text = wrong(make_schedule("1f1b", p, m)); !text.empty())
                return fmt::format("{} ranks, {} micro-batches: {}", p, m, text);
    return "";
}

std::string stuck(const Schedule& schedule) {
    const std::string text = incomplete(schedule);
    return text.empty() ? deadlock(schedule, Sends::posted) : text;
}

}  // namespace

TEST_CASE("lab: every micro-batch once") { expect_none_wrong(first_wrong(false, incomplete)); }

TEST_CASE("lab: all ranks reach the end") { expect_none_wrong(first_wrong(false, stuck)); }

TEST_CASE("lab: fewer micro-batches than ranks") { expect_none_wrong(first_wrong(true, stuck)); }

TEST_CASE("lab: micro-batches in flight") {
    const int64_t p = 4, m = 8, more = std::stoll(drawn("LAB_AHEAD", "0"));
    const Schedule schedule = make_schedule("1f1b", p, m);
    int64_t worst = 0;  // the first rank that is wrong
    while (worst < p - 1 && in_flight(schedule, worst) == std::min(m, p - worst + more)) ++worst;
    const int64_t got = in_flight(schedule, worst);
    figure(fmt::format("in flight on rank {} of {}, {} micro-batches", worst, p, m), got, std::min(m, p - worst + more),
           "", more ? fmt::format("min(m, p-r + {})", more) : "min(m, p-r)",
           more && got != m ? fmt::format("Your seed's warmup has {} forward passes more than 1F1B's.", more)
           : got == m ? "All forward passes come first: that is GPipe, with the activations of all m micro-batches."
           : worst == 0 && got == p + 1
               ? "One too many: the steady state begins with a forward pass, which the warmup need not run."
           : got == 1 ? "Only one at a time, and no warmup on this rank: then the ranks behind it have no work."
           : got == p ? "Every rank runs equally many ahead: the ranks behind have fewer stages to wait for."
                      : "");
}

TEST_CASE("lab: the bubble") {
    const int64_t p = 4, m = 8;
    const Schedule schedule = make_schedule("1f1b", p, m);
    if (const std::string wrong = stuck(schedule); !wrong.empty()) return expect_none_wrong(wrong);
    const double bubble = simulate(schedule, equal_costs(schedule)).bubble();
    figure(fmt::format("idle share of the step, {} ranks, {} micro-batches", p, m), bubble,
           double(p - 1) / double(m + p - 1), "", "(p-1) / (m+p-1)",
           bubble > 0.7 ? "Three of four ranks wait at any time: nothing runs ahead of the first backward pass." : "",
           1e-9);
}
