#include "05_pipeline/complete/schedule_report.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "01_single_gpu/core/check.h"

namespace train70b {

namespace {

// 1.5, 12, 0.333
Cell number(double x) { return {fmt::format("{:.4g}", x), x}; }

// Activations held, in micro-batches of a whole rank: a chunk's are 1/v of them.
Cell in_micro_batches(int64_t chunks_held, int64_t chunks) { return number(double(chunks_held) / double(chunks)); }

}  // namespace

Costs SandboxCosts::of(const Schedule& schedule) const {
    const Costs equal = equal_costs(schedule, forward, input, weight, hop);
    std::vector<double> factor(size_t(schedule.stages), 1.0);
    for (const auto& [rank, times] : slow) factor[size_t(rank)] *= times;
    return {[=](int64_t rank, const Step& step) { return factor[size_t(rank)] * equal.step(rank, step); }, equal.hop};
}

std::string SandboxCosts::text() const {
    std::string text = fmt::format("F {:g}, I {:g}, W {:g}, hop {:g}", forward, input, weight, hop);
    for (const auto& [rank, times] : slow) text += fmt::format(", rank {} x {:g}", rank, times);
    return text;
}

Table ranks_table(const Schedule& s, const Timeline& timeline, const SandboxCosts& costs) {
    Table table(
        "each rank: time of its steps, share of the clock that it idles, own span from its first step to its "
        "last, most activations held",
        {"rank", Column("schedule").csv_only(), Column("ranks").csv_only(), Column("micro_batches").csv_only(),
         Column("chunks").csv_only(), Column("forward").csv_only(), Column("input").csv_only(),
         Column("weight").csv_only(), Column("hop").csv_only(), Column("slowdown").csv_only(), Column("stages").left(),
         Column("begin"), Column("end"), Column("busy"), Column("idle"), Column("own span", "span"),
         Column("idle in it", "span_idle"), Column("in flight: chunks", "in_flight_chunks"),
         Column("micro-batches", "in_flight_micro_batches")});
    for (int64_t rank = 0; rank < s.stages; ++rank) {
        double slowdown = 1;
        for (const auto& [which, times] : costs.slow)
            if (which == rank) slowdown *= times;
        const auto& spans = timeline.ranks[size_t(rank)];
        const int64_t held = in_flight(s, rank);
        table.row({rank, s.name, s.stages, s.micro_batches, s.chunks, number(costs.forward), number(costs.input),
                   number(costs.weight), number(costs.hop), number(slowdown),
                   fmt::format("{}", fmt::join(s.placement.stage[size_t(rank)], " ")), number(spans.front().begin),
                   number(spans.back().end), number(timeline.busy(rank)), percent(timeline.idle(rank)),
                   number(timeline.span(rank)), percent(1 - timeline.busy(rank) / timeline.span(rank)), held,
                   in_micro_batches(held, s.chunks)});
    }
    return table;
}

Table spans_table(const Schedule& s, const Timeline& timeline) {
    Table table("", {"rank", "stage", "step", "pass", "micro_batch", "chunk", "begin", "end", "in_flight_chunks"});
    for (int64_t rank = 0; rank < s.stages; ++rank) {
        int64_t held = 0;
        for (const Timeline::Span& span : timeline.ranks[size_t(rank)]) {
            const Step& step = span.step;
            if (step.pass == Pass::forward) ++held;
            table.row({rank, s.stage_index(rank, step.chunk), to_string(step), std::string(1, letter_of(step.pass)),
                       step.micro_batch, step.chunk, number(span.begin), number(span.end), held});
            if (step.pass == Pass::backward || step.pass == Pass::backward_weight) --held;
        }
    }
    return table;
}

Table steps_table(const Schedule& s, const SandboxCosts& costs, int64_t steps) {
    const double once = simulate(s, costs.of(s)).total();
    const Schedule all = consecutive(s, steps);
    const Timeline timeline = simulate(all, costs.of(s));
    Table table(fmt::format("{} training steps one after another", steps),
                {Column("between two steps").left(), "total", "the first", "each further one", "idle"});
    const double n = double(steps);
    double busy = 0;
    for (int64_t rank = 0; rank < s.stages; ++rank) busy += timeline.busy(rank) / double(s.stages);
    table.row({"all ranks wait for the last (norm of the gradients)", number(n * once), number(once), number(once),
               percent(1 - busy / (n * once))});
    table.row({"each rank goes on with its own first step", number(timeline.total()), number(once),
               number((timeline.total() - once) / std::max(n - 1, 1.0)), percent(timeline.bubble())});
    return table;
}

Table comparison_table(const Schedule* given, int64_t p, int64_t m, const SandboxCosts& costs) {
    Table table(
        fmt::format("{} ranks, {} micro-batches; {}: idle share by the clock, and of the longest rank's own span", p, m,
                    costs.text()),
        {"", "time", "idle", "formula", "own span", "formula", "most in flight: chunks", "= micro-batches",
         Column("blocking sends would").left()});
    // Costs of the formulas.
    const bool plain =
        costs.forward == costs.input && costs.input == costs.weight && costs.hop == 0 && costs.slow.empty();
    const auto row = [&](const Schedule& s, bool formulas) {
        const Timeline timeline = simulate(s, costs.of(s));
        int64_t held = 0;
        for (int64_t rank = 0; rank < p; ++rank) held = std::max(held, in_flight(s, rank));
        table.row({s.name, number(timeline.total()), percent(timeline.bubble()),
                   formulas ? percent(bubble_formula(s)) : Cell("-"), percent(timeline.span_bubble()),
                   formulas ? percent(span_bubble_formula(s)) : Cell("-"), held, in_micro_batches(held, s.chunks),
                   deadlock(s, Sends::blocking).empty() ? "end" : "deadlock"});
    };
    if (given) row(*given, false);
    for (const ScheduleGenerator& generator : schedule_generators()) {
        if (p == 1 && generator.default_chunks() > 1) continue;
        if (const std::string problem = generator.problem(p, m, "--stages"); !problem.empty())
            table.note(fmt::format("{}: {}", generator.name, problem));
        else
            row(make_schedule(generator.name, p, m), plain);
    }
    return table;
}

}  // namespace train70b
