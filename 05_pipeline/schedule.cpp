#include "05_pipeline/schedule.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "01_single_gpu/core/registry.h"

namespace train70b {

char letter_of(Pass pass) { return "FBIW"[int(pass)]; }

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

// Warm-up: one forward pass for each stage between this one and the head. Then one forward, one backward in turn.
// tag::1f1b[]
Steps one_forward_one_backward(int64_t p, int64_t m, int64_t rank) {
    Steps steps;
    const int64_t ahead = std::min(m, p - 1 - rank);
    for (int64_t i = 0; i < ahead; ++i) steps.push_back({forward, i});
    for (int64_t i = 0; i < m; ++i) {
        if (i + ahead < m) steps.push_back({forward, i + ahead});
        steps.push_back({backward, i});
    }
    return steps;
}
// end::1f1b[]

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

// 1F1B's order of F and I. 1F1B idles at the end of the step, the longest on the last rank: rank r runs its weight
// gradients r micro-batches late to fill that time.
Steps zero_bubble(int64_t p, int64_t m, int64_t rank) {
    Steps steps;
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
    return steps;
}

double share(int64_t idle, int64_t work) { return double(idle) / double(work + idle); }

}  // namespace

const std::vector<ScheduleGenerator>& schedule_generators() {
    using Size = PipelineSize;
    static const std::vector<ScheduleGenerator> list = {
        {.name = "naive",
         .description = "one micro-batch at a time",
         .virtual_stages = false,
         .steps = [](Size s, int64_t) { return naive(s.m); },
         .bubble = [](Size s) { return share(s.p - 1, 1); },
         .in_flight = [](Size, int64_t) { return int64_t(1); }},
        {.name = "gpipe",
         .description = "all forward passes, then all backward passes",
         .virtual_stages = false,
         .steps = [](Size s, int64_t) { return gpipe(s.m); },
         .bubble = [](Size s) { return share(s.p - 1, s.m); },
         .in_flight = [](Size s, int64_t) { return s.m; }},
        {.name = "1f1b",
         .description = "one forward pass, one backward pass in turn",
         .virtual_stages = false,
         .steps = [](Size s, int64_t rank) { return one_forward_one_backward(s.p, s.m, rank); },
         .bubble = [](Size s) { return share(s.p - 1, s.m); },
         .in_flight = [](Size s, int64_t rank) { return std::min(s.m, s.p - rank); }},
        {.name = "interleaved",
         .description = "1f1b over several model chunks per rank",
         .virtual_stages = true,
         .steps = [](Size s, int64_t rank) { return interleaved(s.p, s.m, s.v, rank); },
         .bubble = [](Size s) { return share(s.p - 1, s.v * s.m); },
         .in_flight = [](Size s,
                         int64_t rank) { return std::min(s.m * s.v, 2 * (s.p - 1 - rank) + (s.v - 1) * s.p + 1); }},
        {.name = "zero-bubble",
         .description = "1f1b with delayed weight gradients (ZB-H1)",
         .virtual_stages = false,
         .steps = [](Size s, int64_t rank) { return zero_bubble(s.p, s.m, rank); },
         .bubble = [](Size s) { return share(s.p - 1, 3 * s.m); },
         .in_flight = [](Size s, int64_t) { return std::min(s.m, s.p); }}};
    return list;
}

const ScheduleGenerator& find_schedule(const std::string& name) {
    return find_entry(schedule_generators(), "--pipeline", name);
}

Schedule make_schedule(const std::string& name, int64_t p, int64_t m, int64_t v) {
    CHECK(p > 0 && m > 0 && v > 0, "{} stages, {} micro-batches, {} chunks", p, m, v);
    const ScheduleGenerator& generator = find_schedule(name);
    if (generator.virtual_stages && m % p != 0)
        usage_error("--pipeline {}: {} micro-batches are not divisible by --pp {} (try {}{})", name, m, p,
                    m > p ? fmt::format("{} or ", m / p * p) : "", (m / p + 1) * p);
    CHECK(v == 1 || generator.virtual_stages, "{} with {} chunks", name, v);
    constexpr int64_t kMost = 10'000'000;  // passes of all ranks; every rank holds the list
    if (m > kMost / (p * v))
        usage_error(
            "--global-batch: {} micro-batches through {} x {} stages are more than {} (try a larger --micro-batch)", m,
            p, v, kMost);
    Schedule schedule{name, p, m, v, {}};
    for (int64_t rank = 0; rank < p; ++rank) schedule.ranks.push_back(generator.steps({p, m, v}, rank));
    return schedule;
}

// ---- checks ---------------------------------------------------------------------------------------------------------

std::string incomplete(const Schedule& s) {
    if (int64_t(s.ranks.size()) != s.stages) return fmt::format("{} lists for {} ranks", s.ranks.size(), s.stages);
    for (int64_t rank = 0; rank < s.stages; ++rank) {
        std::map<std::tuple<int64_t, int64_t>, std::string> done;  // micro-batch, chunk -> the letters so far
        for (const Step& step : s.ranks[size_t(rank)]) {
            const std::string where = fmt::format("rank {}: {}", rank, to_string(step));
            if (step.micro_batch < 0 || step.micro_batch >= s.micro_batches || step.chunk < 0 || step.chunk >= s.chunks)
                return fmt::format("{} names no micro-batch or chunk of the schedule", where);
            std::string& letters = done[{step.micro_batch, step.chunk}];
            const std::string before = step.pass == forward ? "" : step.pass == backward_weight ? "FI" : "F";
            if (letters != before)
                return fmt::format("{} comes after \"{}\", not \"{}\", of its micro-batch", where, letters, before);
            letters += letter_of(step.pass);
        }
        for (int64_t i = 0; i < s.micro_batches; ++i)
            for (int64_t c = 0; c < s.chunks; ++c) {
                const std::string& letters = done[{i, c}];
                if (letters != "FB" && letters != "FIW")
                    return fmt::format("rank {}: micro-batch {} goes through chunk {} as \"{}\", not FB or FIW", rank,
                                       i, c, letters);
            }
    }
    return {};
}

namespace {

// A step as the rank executes it: receive its input, compute, send its output.
struct Action {
    enum class Kind { receive, compute, send } kind;
    Step step;
    int64_t peer = -1;  // receive, send
    int64_t stage = 0;  // stage index of the message's producer
};

bool is_backward(Pass pass) { return pass == backward || pass == backward_input; }

std::vector<Action> actions(const Schedule& s, int64_t rank) {
    std::vector<Action> list;
    for (const Step& step : s.ranks[size_t(rank)]) {
        const int64_t stage = s.stage_index(rank, step.chunk), below = stage - 1, above = stage + 1;
        const bool has_below = stage > 0, has_above = above < s.stage_count();
        if (step.pass == forward && has_below) list.push_back({Action::Kind::receive, step, s.rank_of(below), below});
        if (is_backward(step.pass) && has_above) list.push_back({Action::Kind::receive, step, s.rank_of(above), above});
        list.push_back({Action::Kind::compute, step, -1, stage});
        if (step.pass == forward && has_above) list.push_back({Action::Kind::send, step, s.rank_of(above), stage});
        if (is_backward(step.pass) && has_below) list.push_back({Action::Kind::send, step, s.rank_of(below), stage});
    }
    return list;
}

// Forward or backward, micro-batch, stage index of the producer.
using Message = std::tuple<bool, int64_t, int64_t>;
Message message_of(const Action& a) { return {a.step.pass == forward, a.step.micro_batch, a.stage}; }

std::string describe_message(const Message& message) {
    const auto& [activations, micro_batch, stage] = message;
    return fmt::format("{} of micro-batch {}", activations ? "activations" : "the gradient", micro_batch);
}

}  // namespace

std::string deadlock(const Schedule& s, Sends sends) {
    std::vector<std::vector<Action>> todo;
    for (int64_t rank = 0; rank < s.stages; ++rank) todo.push_back(actions(s, rank));
    std::vector<size_t> at(todo.size());
    const auto current = [&](int64_t rank) -> const Action* {
        return at[size_t(rank)] < todo[size_t(rank)].size() ? &todo[size_t(rank)][at[size_t(rank)]] : nullptr;
    };
    std::map<Message, bool> sent;
    // Whether the action can happen now; a blocking send needs both ranks to have reached it.
    const auto can_go = [&](const Action& action) {
        if (action.kind == Action::Kind::compute || action.peer < 0) return true;
        if (sends == Sends::posted) return action.kind == Action::Kind::send || sent[message_of(action)];
        const Action* other = current(action.peer);
        return other && other->kind != Action::Kind::compute && other->kind != action.kind &&
               message_of(*other) == message_of(action);
    };
    for (bool moved = true; moved;) {
        moved = false;
        for (int64_t rank = 0; rank < s.stages; ++rank) {
            const Action* action = current(rank);
            if (!action || !can_go(*action)) continue;
            if (action->kind == Action::Kind::send) sent[message_of(*action)] = true;
            if (sends == Sends::blocking && action->kind != Action::Kind::compute) ++at[size_t(action->peer)];
            ++at[size_t(rank)];
            moved = true;
        }
    }
    // Every rank that has not finished waits for a peer: following the peers leads into a cycle, or to a rank that has
    // ended.
    int64_t rank = 0;
    while (rank < s.stages && !current(rank)) ++rank;
    if (rank == s.stages) return {};
    std::vector<int64_t> path;
    while (current(rank) && std::find(path.begin(), path.end(), rank) == path.end()) {
        path.push_back(rank);
        rank = current(rank)->peer;
    }
    if (current(rank)) path.erase(path.begin(), std::find(path.begin(), path.end(), rank));
    std::string text;
    for (const int64_t each : path) {
        const Action& action = *current(each);
        text +=
            fmt::format("{}rank {} at {} {} {} {} rank {}", text.empty() ? "" : "; ", each, to_string(action.step),
                        action.kind == Action::Kind::send ? "sends" : "waits for", describe_message(message_of(action)),
                        action.kind == Action::Kind::send ? "to" : "from", action.peer);
    }
    return text + (current(rank) ? "" : fmt::format("; rank {} has ended", rank));
}

// ---- what follows from the order ------------------------------------------------------------------------------------

int64_t in_flight(const Schedule& s, int64_t rank) {
    int64_t now = 0, most = 0;
    for (const Step& step : s.ranks[size_t(rank)]) {
        if (step.pass == forward) most = std::max(most, ++now);
        if (step.pass == backward || step.pass == backward_weight) --now;
    }
    return most;
}

int64_t in_flight_formula(const Schedule& s, int64_t rank) {
    return find_schedule(s.name).in_flight({s.stages, s.micro_batches, s.chunks}, rank);
}

double bubble_formula(const Schedule& s) { return find_schedule(s.name).bubble({s.stages, s.micro_batches, s.chunks}); }

}  // namespace train70b
