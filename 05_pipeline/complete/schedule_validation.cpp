// What is known of a schedule before it runs: no step is missing, no rank waits for ever, how much is in flight.
#include <algorithm>
#include <tuple>

#include "01_single_gpu/core/check.h"
#include "05_pipeline/complete/schedule.h"

namespace train70b {

using enum Pass;

// ---- complete -------------------------------------------------------------------------------------------------------

std::string incomplete(const Schedule& s) {
    if (int64_t(s.ranks.size()) != s.stages) return fmt::format("{} lists for {} ranks", s.ranks.size(), s.stages);
    for (int64_t rank = 0; rank < s.stages; ++rank) {
        std::vector<std::string> done(size_t(s.micro_batches * s.chunks));  // of each chunk of each: the letters so far
        for (const Step& step : s.ranks[size_t(rank)]) {
            const auto where = [&] { return fmt::format("rank {}: {}", rank, to_string(step)); };
            if (step.micro_batch < 0 || step.micro_batch >= s.micro_batches || step.chunk < 0 || step.chunk >= s.chunks)
                return fmt::format("{} names no micro-batch or chunk of the schedule", where());
            std::string& letters = done[size_t(step.micro_batch * s.chunks + step.chunk)];
            const std::string before = step.pass == forward ? "" : step.pass == backward_weight ? "FI" : "F";
            if (before != letters && before.starts_with(letters))
                return fmt::format("{} comes before the {} of its micro-batch", where(), before[letters.size()]);
            if (before != letters)
                return fmt::format("{} is one too many: {} of its micro-batch came before", where(), letters);
            letters += letter_of(step.pass);
        }
        for (int64_t i = 0; i < s.micro_batches; ++i)
            for (int64_t c = 0; c < s.chunks; ++c) {
                const std::string& letters = done[size_t(i * s.chunks + c)];
                if (letters.empty()) return fmt::format("rank {}: micro-batch {} is missing in chunk {}", rank, i, c);
                if (letters != "FB" && letters != "FIW")
                    return fmt::format("rank {}: micro-batch {} goes through chunk {} as \"{}\", not FB or FIW", rank,
                                       i, c, letters);
            }
    }
    return {};
}

// ---- free of deadlock -----------------------------------------------------------------------------------------------

namespace {

// A step as the rank executes it: receive its input, compute, send its output. Between two stages of one rank the peer
// is the rank itself: the output is kept for a later step.
struct Action {
    enum class Kind { receive, compute, send } kind;
    Step step;
    int64_t peer = -1;  // receive, send
    int64_t stage = 0;  // stage index of the message's producer
};

std::vector<Action> actions(const Schedule& s, int64_t rank) {
    std::vector<Action> list;
    for (const Step& step : s.ranks[size_t(rank)]) {
        const int64_t stage = s.stage_index(rank, step.chunk), next = step.pass == forward ? 1 : -1;
        const auto has_message = [&](int64_t other) {  // W neither receives nor sends
            return step.pass != backward_weight && other >= 0 && other < s.stage_count();
        };
        const int64_t from = stage - next, to = stage + next;
        if (has_message(from)) list.push_back({Action::Kind::receive, step, s.rank_of(from), from});
        list.push_back({Action::Kind::compute, step, -1, stage});
        if (has_message(to)) list.push_back({Action::Kind::send, step, s.rank_of(to), stage});
    }
    return list;
}

// Forward or backward, micro-batch, stage index of the producer.
using Message = std::tuple<bool, int64_t, int64_t>;
Message message_of(const Action& a) { return {a.step.pass == forward, a.step.micro_batch, a.stage}; }

}  // namespace

std::string deadlock(const Schedule& s, Sends sends) {
    std::vector<std::vector<Action>> todo;
    for (int64_t rank = 0; rank < s.stages; ++rank) todo.push_back(actions(s, rank));
    std::vector<size_t> at(todo.size());
    const auto current = [&](int64_t rank) -> const Action* {
        return at[size_t(rank)] < todo[size_t(rank)].size() ? &todo[size_t(rank)][at[size_t(rank)]] : nullptr;
    };
    std::vector<char> sent(size_t(2 * s.micro_batches * s.stage_count()));
    const auto was_sent = [&](const Action& a) -> char& {
        const int64_t before = a.step.pass == forward ? 0 : s.micro_batches;
        return sent[size_t((before + a.step.micro_batch) * s.stage_count() + a.stage)];
    };
    // Whether the rank can do this now; a blocking send needs both ranks to have reached it.
    const auto can_go = [&](int64_t rank, const Action& action) {
        if (action.kind == Action::Kind::compute) return true;
        if (sends == Sends::posted || action.peer == rank) return action.kind == Action::Kind::send || was_sent(action);
        const Action* other = current(action.peer);
        return other && other->kind != Action::Kind::compute && other->kind != action.kind &&
               message_of(*other) == message_of(action);
    };
    for (bool moved = true; moved;) {
        moved = false;
        for (int64_t rank = 0; rank < s.stages; ++rank)
            for (const Action* action = current(rank); action && can_go(rank, *action); action = current(rank)) {
                if (action->kind == Action::Kind::send) was_sent(*action) = 1;
                if (sends == Sends::blocking && action->kind != Action::Kind::compute && action->peer != rank)
                    ++at[size_t(action->peer)];
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
    for (const int64_t node : path) {
        const Action& action = *current(node);
        const bool sending = action.kind == Action::Kind::send;
        text += fmt::format("{}rank {} at {} {} {} of micro-batch {} {} {}", text.empty() ? "" : "; ", node,
                            to_string(action.step), sending ? "sends" : "waits for",
                            action.step.pass == forward ? "activations" : "the gradient", action.step.micro_batch,
                            sending ? "to" : "from",
                            action.peer == node ? "a later step of its own" : fmt::format("rank {}", action.peer));
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

}  // namespace train70b
