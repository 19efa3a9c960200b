#pragma once
// Recordings for the simulation, of pipelines and random ones, and what holds for every simulated step.
#include <set>
#include <tuple>

#include "05_pipeline/complete/schedule_simulation.h"
#include "08_3d_full/plan/flows.h"
#include "08_3d_full/plan/record.h"
#include "08_3d_full/plan/simulate_flag.h"
#include "tests/simulation.h"

namespace train70b::test {

// A pipeline as its executor runs it (05_pipeline/complete/pipeline.cpp): a channel up and one down between neighbours,
// and the next receive of a channel posted ahead. Family 0 is the world, family 1 the pipeline.
inline Recording pipeline_recording(const Schedule& schedule, const std::function<double(const Step&)>& seconds) {
    const int64_t p = schedule.stages;
    std::vector<GroupFamily> families = {{.name = "pp", .parent = 0, .colors = std::vector<int>(size_t(p), 0)}};
    std::map<std::pair<int64_t, int64_t>, int> channel;  // from, to: a family
    const auto open = [&](int64_t from, int64_t to) {
        GroupFamily family{.name = "pp", .parent = 1, .colors = std::vector<int>(size_t(p), -1)};
        family.colors[size_t(from)] = family.colors[size_t(to)] = 0;
        families.push_back(family);
        channel[{from, to}] = int(families.size());
    };
    for (int64_t stage = 0; stage + 1 < schedule.stage_count(); ++stage) {
        const int64_t below = schedule.rank_of(stage), above = schedule.rank_of(stage + 1);
        if (below == above || channel.contains({below, above})) continue;
        open(below, above);
        open(above, below);
    }
    std::vector<Script> scripts(static_cast<size_t>(p));
    // In torn-up lists of messages: (forward, micro-batch, the sender's stage).
    using Message = std::tuple<bool, int64_t, int64_t>;
    for (int64_t rank = 0; rank < p; ++rank) {
        Script& script = scripts[size_t(rank)];
        struct In {
            std::vector<Message> expected;
            size_t next = 0;
            std::set<Message> arrived;
            int32_t posted = -1;
        };
        std::map<int, In> in;
        // Keyed by direction too: with two ranks the channel up of one pair is not the channel down of another.
        const auto family = [&](int64_t from, int64_t to) { return channel.at({from, to}); };
        for (int64_t from = 0; from < p; ++from)
            for (const Step& step : schedule.ranks[size_t(from)]) {
                if (step.pass == Pass::backward_weight || from == rank) continue;
                const bool forward = step.pass == Pass::forward;
                const int64_t stage = schedule.stage_index(from, step.chunk), to = forward ? stage + 1 : stage - 1;
                if (to >= 0 && to < schedule.stage_count() && schedule.rank_of(to) == rank)
                    in[family(from, rank)].expected.push_back({forward, step.micro_batch, stage});
            }
        const auto post = [&](int f) {
            In& from = in[f];
            if (from.posted >= 0 || from.next == from.expected.size()) return;
            ++from.next;
            const auto& colors = families[size_t(f) - 1].colors;
            const int64_t first = std::find(colors.begin(), colors.end(), 0) - colors.begin();
            from.posted = script.call(
                {.family = f, .operation = "recv", .bytes = 1, .from = first == rank ? 1 : 0, .channel = true});
        };
        for (const Step& step : schedule.ranks[size_t(rank)]) {
            const bool forward = step.pass == Pass::forward;
            const int64_t stage = schedule.stage_index(rank, step.chunk), source = forward ? stage - 1 : stage + 1;
            const int64_t to = forward ? stage + 1 : stage - 1;
            if (step.pass != Pass::backward_weight && source >= 0 && source < schedule.stage_count() &&
                schedule.rank_of(source) != rank) {
                const int f = family(schedule.rank_of(source), rank);
                In& from = in[f];
                while (!from.arrived.contains({forward, step.micro_batch, source})) {
                    post(f);
                    REQUIRE(from.posted >= 0);
                    script.wait(from.posted);
                    from.posted = -1;
                    from.arrived.insert(from.expected[from.next - 1]);
                }
                post(f);
            }
            script.op(seconds(step), to_string(step));
            if (step.pass != Pass::backward_weight && to >= 0 && to < schedule.stage_count() &&
                schedule.rank_of(to) != rank) {
                const int f = family(rank, schedule.rank_of(to));
                const auto& colors = families[size_t(f) - 1].colors;
                const int64_t first = std::find(colors.begin(), colors.end(), 0) - colors.begin();
                script.call(
                    {.family = f, .operation = "send", .bytes = 1, .to = first == rank ? 1 : 0, .channel = true});
            }
        }
    }
    return recording_of(p, families, scripts, [](int64_t rank) { return int(rank); });
}

inline GroupFamily family(const std::string& name, int64_t ranks, const std::function<int(int64_t)>& color) {
    GroupFamily made{.name = name, .parent = 0};
    for (int64_t rank = 0; rank < ranks; ++rank) made.colors.push_back(color(rank));
    return made;
}

// What must hold of any simulated step.
inline void expect_sound(const SimulatedStep& step) {
    EXPECT(near(sum_of_parts(step), step.seconds));
    EXPECT(step.compute >= 0);
    EXPECT(step.host >= 0);
    std::map<std::pair<int64_t, int>, std::vector<std::pair<double, double>>> streams;
    for (const SimulatedStep::Span& span : step.spans) {
        EXPECT(span.begin >= 0);
        EXPECT(span.end >= span.begin);
        EXPECT(span.end <= step.seconds * (1 + 1e-12));
        if (span.stream >= 0) streams[{span.rank, span.stream}].push_back({span.begin, span.end});
    }
    for (auto& [stream, spans] : streams) {
        std::sort(spans.begin(), spans.end());
        for (size_t i = 1; i < spans.size(); ++i) EXPECT(spans[i].first >= spans[i - 1].second - 1e-9 * step.seconds);
    }
}

inline void expect_equal(const SimulatedStep& a, const SimulatedStep& b) {
    EXPECT(near(a.seconds, b.seconds));
    EXPECT(std::abs(a.compute - b.compute) <= 1e-9 * b.seconds);
    EXPECT(std::abs(a.host - b.host) <= 1e-9 * b.seconds);
    const auto equal = [&](const std::map<std::string, double>& x, std::map<std::string, double> y) {
        for (const auto& [name, seconds] : x) y[name] -= seconds;
        for (const auto& [name, difference] : y) {
            INFO(name);
            EXPECT(std::abs(difference) <= 1e-9 * b.seconds);
        }
    };
    equal(a.exposed, b.exposed);
    equal(a.waiting, b.waiting);
}

// A random step of tp x dp x pp ranks: every stage has its own random list of ops, collectives of its tp, dp and ring
// groups that are waited for at random later, messages to the next stage, and sums over the world.
inline Recording random_recording(uint64_t seed, int64_t tp, int64_t dp, int64_t pp) {
    uint64_t counter = 0;
    const auto random = [&](int64_t n) { return int64_t(random_bits(seed, counter++) % uint64_t(n)); };
    const int64_t ranks = tp * dp * pp;
    std::vector<GroupFamily> families = {
        family("tp", ranks, [&](int64_t r) { return int(r / tp); }),
        family("dp", ranks, [&](int64_t r) { return int(r / (tp * dp) * tp + r % tp); }),
        family("pp", ranks, [&](int64_t r) { return int(r % (tp * dp)); })};
    for (int64_t stage = 0; stage + 1 < pp; ++stage) {
        GroupFamily channel{.name = "pp", .parent = 3, .colors = std::vector<int>(size_t(pp), -1)};
        channel.colors[size_t(stage)] = channel.colors[size_t(stage) + 1] = 0;
        families.push_back(channel);
    }
    std::vector<Script> scripts(static_cast<size_t>(pp));
    const int64_t micro_batches = 1 + random(3), sums = random(2);
    for (int64_t stage = 0; stage < pp; ++stage) {
        Script& script = scripts[size_t(stage)];
        std::vector<int32_t> open;
        for (int64_t m = 0; m < micro_batches; ++m) {
            if (stage > 0)
                script.wait(script.call(
                    {.family = int(3 + stage), .operation = "recv", .bytes = 100, .from = 0, .channel = true}));
            for (int64_t i = random(12); i >= 0; --i) {
                const int64_t bytes = 1 + random(400);
                switch (random(6)) {
                    case 0: open.push_back(script.collective(1, bytes)); break;
                    case 1: open.push_back(script.collective(2, bytes, "all_gather")); break;
                    case 2:
                        if (dp > 1)
                            open.push_back(script.call({.family = 2,
                                                        .operation = "send_recv",
                                                        .bytes = bytes,
                                                        .to = int(1 % dp),
                                                        .from = int(dp - 1),
                                                        .received = bytes,
                                                        .shift = true}));
                        break;
                    case 3:
                        if (!open.empty()) {
                            const size_t which = size_t(random(int64_t(open.size())));
                            script.wait(open[which]);
                            open.erase(open.begin() + int64_t(which));
                        }
                        break;
                    default: script.op(0.01 * double(1 + random(100))); script.book(random(2) ? 8 : 0);
                }
            }
            if (stage + 1 < pp)
                open.push_back(script.call(
                    {.family = int(4 + stage), .operation = "send", .bytes = 100, .to = 1, .channel = true}));
            script.part(Sequence::Part::Kind::schedule_step, {Pass::forward, m});
        }
        for (int64_t i = 0; i < sums; ++i) script.wait(script.collective(0, 8, "scalar"));
        while (!open.empty()) {
            if (random(2)) script.wait(open.back());
            open.pop_back();
        }
        script.op(0.1);
    }
    return recording_of(ranks, families, scripts, [&](int64_t rank) { return int(rank / (tp * dp)); });
}

}  // namespace train70b::test
