#include "05_pipeline/complete/schedule.h"

#include <algorithm>

#include "01_single_gpu/core/registry.h"

namespace train70b {

std::string to_string(const Step& step) {
    return fmt::format("{}{}{}", letter_of(step.pass), step.micro_batch,
                       step.chunk > 0 ? fmt::format(".{}", step.chunk) : "");
}

// ---- the schedules --------------------------------------------------------------------------------------------------

namespace {

using Steps = std::vector<Step>;
using enum Pass;

Steps naive(int64_t m) {
    Steps steps;
    for (int64_t i = 0; i < m; ++i) steps.insert(steps.end(), {{forward, i}, {backward, i}});
    return steps;
}

Steps gpipe(int64_t m) {
    Steps steps;
    for (int64_t i = 0; i < m; ++i) steps.push_back({forward, i});
    for (int64_t i = 0; i < m; ++i) steps.push_back({backward, i});
    return steps;
}

Steps one_forward_one_backward(int64_t p, int64_t m, int64_t rank) {
    Steps steps;
    // tag::lab-one-f-one-b[]
    // Warmup: a forward pass for each stage between this one and the head. Then one forward, one backward in turn.
    const int64_t ahead = std::min(m, p - 1 - rank);
    for (int64_t i = 0; i < ahead; ++i) steps.push_back({forward, i});
    for (int64_t i = 0; i < m; ++i) {
        if (i + ahead < m) steps.push_back({forward, i + ahead});
        steps.push_back({backward, i});
    }
    // end::lab-one-f-one-b[]
    return steps;
}

// Micro-batches go in groups of p: a group through chunk 0, then through chunk 1, and so on; then the next group.
Steps interleaved(int64_t p, int64_t m, int64_t v, int64_t rank) {
    const auto nth = [=](Pass pass, int64_t k) {
        const int64_t chunk = k % (p * v) / p;
        return Step{pass, k / (p * v) * p + k % p, pass == forward ? chunk : v - 1 - chunk};
    };
    Steps steps;
    const int64_t all = m * v, ahead = std::min(all, 2 * (p - 1 - rank) + (v - 1) * p);
    for (int64_t k = 0; k < ahead; ++k) steps.push_back(nth(forward, k));
    for (int64_t k = 0; k < all; ++k) {
        if (k + ahead < all) steps.push_back(nth(forward, k + ahead));
        steps.push_back(nth(backward, k));
    }
    return steps;
}

Steps zero_bubble(int64_t p, int64_t m, int64_t rank) {
    Steps steps;
    // tag::lab-zero-bubble-w[]
    // 1F1B's order of F and I. 1F1B idles at the end of the step, the longest on the last rank: rank r runs its weight
    // gradients r micro-batches late to fill that time.
    const int64_t ahead = std::min(m, p - 1 - rank);
    int64_t weights = 0;
    for (int64_t i = 0; i < ahead; ++i) steps.push_back({forward, i});
    for (int64_t i = 0; i < m; ++i) {
        const bool more = i + ahead < m;
        if (more) steps.push_back({forward, i + ahead});
        steps.push_back({backward_input, i});
        if (i >= rank || !more) steps.push_back({backward_weight, weights++});
    }
    while (weights < m) steps.push_back({backward_weight, weights++});
    // end::lab-zero-bubble-w[]
    return steps;
}

double share(int64_t idle, int64_t work) { return double(idle) / double(work + idle); }

}  // namespace

// ---- placements -----------------------------------------------------------------------------------------------------

Placement placement_of(std::vector<std::vector<int64_t>> stage) {
    size_t count = 0;
    for (const auto& chunks : stage) count += chunks.size();
    std::vector<int64_t> rank(count, -1);
    for (size_t r = 0; r < stage.size(); ++r)
        for (const int64_t s : stage[r]) {
            CHECK(s >= 0 && s < int64_t(count) && rank[size_t(s)] < 0, "stage {} of {}", s, count);
            rank[size_t(s)] = int64_t(r);
        }
    return {std::move(stage), std::move(rank)};
}

Placement loop_placement(int64_t p, int64_t v) {
    std::vector<std::vector<int64_t>> stage{size_t(p)};
    for (int64_t rank = 0; rank < p; ++rank)
        for (int64_t chunk = 0; chunk < v; ++chunk) stage[size_t(rank)].push_back(chunk * p + rank);
    return placement_of(std::move(stage));
}

Placement v_placement(int64_t p) {
    std::vector<std::vector<int64_t>> stage;
    for (int64_t rank = 0; rank < p; ++rank) stage.push_back({rank, 2 * p - 1 - rank});
    return placement_of(std::move(stage));
}

// ---- the list -------------------------------------------------------------------------------------------------------

const std::vector<ScheduleGenerator>& schedule_generators() {
    using Size = PipelineSize;
    using enum ScheduleGenerator::Chunks;
    static std::vector<ScheduleGenerator> list = {
        {.name = "naive",
         .chunks = one,
         .steps = [](Size s, int64_t) { return naive(s.m); },
         .bubble = [](Size s) { return share(s.p - 1, 1); },
         .in_flight = [](Size, int64_t) { return int64_t(1); },
         .on_request = "all ranks but one idle"},
        {.name = "gpipe",
         .chunks = one,
         .steps = [](Size s, int64_t) { return gpipe(s.m); },
         .bubble = [](Size s) { return share(s.p - 1, s.m); },
         .in_flight = [](Size s, int64_t) { return s.m; },
         .on_request = "1f1b has its bubble, and holds fewer micro-batches"},
        {.name = "1f1b",
         .chunks = one,
         .steps = [](Size s, int64_t rank) { return one_forward_one_backward(s.p, s.m, rank); },
         .bubble = [](Size s) { return share(s.p - 1, s.m); },
         .in_flight = [](Size s, int64_t rank) { return std::min(s.m, s.p - rank); }},
        {.name = "interleaved",
         .chunks = loop,
         .steps = [](Size s, int64_t rank) { return interleaved(s.p, s.m, s.v, rank); },
         .bubble = [](Size s) { return share(s.p - 1, s.v * s.m); },
         .in_flight = [](Size s,
                         int64_t rank) { return std::min(s.m * s.v, 2 * (s.p - 1 - rank) + (s.v - 1) * s.p + 1); },
         .multiple = [](int64_t p) { return p; }},  // of groups of p micro-batches
        {.name = "zero-bubble",
         .chunks = one,
         .steps = [](Size s, int64_t rank) { return zero_bubble(s.p, s.m, rank); },
         .bubble = [](Size s) { return share(std::max(s.p - 1, 2 * s.p - 1 - s.m), 3 * s.m); },
         .in_flight = [](Size s, int64_t) { return std::min(s.m, s.p); }},
        {.name = "zb-v",
         .chunks = v,
         .steps = [](Size s, int64_t rank) { return zb_v(s.p, s.m, rank); },
         .bubble = [](Size s) { return share(std::max(zb_v_wait(s), s.p - 1), 6 * s.m); },
         .span_bubble = [](Size s) { return share(zb_v_wait(s), 6 * s.m); },
         .in_flight =
             [](Size s, int64_t rank) {
                 return std::min({2 * s.p, 2 * s.m, s.m + 1 + rank});
             }},
        {.name = "dualpipe-v",
         .chunks = v,
         .steps = [](Size s, int64_t rank) { return dualpipe_v(s.p, s.m, rank); },
         .bubble = [](Size s) { return share(s.p - 1, 6 * s.m); },
         .in_flight = [](Size s, int64_t) { return 2 * s.p + 1; },
         .least = [](int64_t p) { return 2 * p; },
         .on_request = "what its two directions overlap for each other is not implemented here"}};
    return list;
}

std::string ScheduleGenerator::problem(int64_t p, int64_t m, const std::string& stages_flag) const {
    if (const int64_t unit = multiple ? multiple(p) : 1; m % unit != 0)
        return fmt::format("{} micro-batches are not divisible by {} {} (try {}{})", m, stages_flag, p,
                           m > unit ? fmt::format("{} or ", m / unit * unit) : "", (m / unit + 1) * unit);
    if (const int64_t fewest = least ? least(p) : 1; m < fewest)
        return fmt::format("{} micro-batches are fewer than {} on {} {} (try {}, or zb-v)", m, fewest, stages_flag, p,
                           fewest);
    return {};
}

const ScheduleGenerator& find_schedule(const std::string& name) {
    return find_entry(schedule_generators(), "--pipeline", name);
}

Placement make_placement(const std::string& name, int64_t p, int64_t v) {
    const ScheduleGenerator& generator = find_schedule(name);
    CHECK(v == generator.default_chunks() || generator.chunks == ScheduleGenerator::Chunks::loop, "{} with {} chunks",
          name, v);
    return generator.chunks == ScheduleGenerator::Chunks::v ? v_placement(p) : loop_placement(p, v);
}

Schedule make_schedule(const std::string& name, int64_t p, int64_t m, int64_t v) {
    const ScheduleGenerator& generator = find_schedule(name);
    if (v == 0) v = generator.default_chunks();
    CHECK(p > 0 && m > 0 && v > 0, "{} stages, {} micro-batches, {} chunks", p, m, v);
    if (const std::string problem = generator.problem(p, m); !problem.empty())
        usage_error("--pipeline {}: {}", name, problem);
    constexpr int64_t kMost = 10'000'000;  // passes of all ranks; every rank holds the list
    if (m > kMost / (p * v))
        usage_error(
            "--global-batch: {} micro-batches through {} x {} stages are more than {} (try a larger --micro-batch)", m,
            p, v, kMost);
    Schedule schedule{name, p, m, v, {}, make_placement(name, p, v)};
    for (int64_t rank = 0; rank < p; ++rank) schedule.ranks.push_back(generator.steps({p, m, v}, rank));
    return schedule;
}

int64_t in_flight_formula(const Schedule& s, int64_t rank) {
    return find_schedule(s.name).in_flight({s.stages, s.micro_batches, s.chunks}, rank);
}

double bubble_formula(const Schedule& s) { return find_schedule(s.name).bubble({s.stages, s.micro_batches, s.chunks}); }

double span_bubble_formula(const Schedule& s) {
    const ScheduleGenerator& generator = find_schedule(s.name);
    return (generator.span_bubble ? generator.span_bubble : generator.bubble)({s.stages, s.micro_batches, s.chunks});
}

}  // namespace train70b
