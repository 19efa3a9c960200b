#include "08_3d_full/plan/check_deadlock.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "01_single_gpu/core/check.h"
#include "08_3d_full/plan/sequence.h"

namespace train70b {

// ---- classes --------------------------------------------------------------------------------------------------------

namespace {

using Key = std::vector<int32_t>;

}  // namespace

std::vector<int32_t> equal_ranks(const Recording& recording, const GroupTable& groups,
                                 const std::vector<CallOrder>& orders, bool by_rank) {
    const size_t ranks = size_t(recording.ranks);
    std::vector<int32_t> class_of(ranks);
    if (by_rank) {
        for (size_t rank = 0; rank < ranks; ++rank) class_of[rank] = int32_t(rank);
        return class_of;
    }
    std::set<int32_t> used;  // sequences
    for (const int32_t each : recording.class_of) used.insert(each);
    for (size_t rank = 0; rank < ranks; ++rank)
        class_of[rank] = int32_t(std::distance(used.begin(), used.find(recording.class_of[rank])));
    for (size_t count = used.size();;) {
        Numbering<Key> next;
        std::vector<Key> keys(ranks);
        for (size_t rank = 0; rank < ranks; ++rank) keys[rank] = {class_of[rank]};
        for (size_t family = 0; family < recording.families.size(); ++family) {
            Numbering<Key> sets;
            for (const std::vector<int32_t>& members : groups.of(int(family)).members) {
                Key set;
                for (const int32_t rank : members) set.push_back(class_of[size_t(rank)]);
                std::sort(set.begin(), set.end());
                set.erase(std::unique(set.begin(), set.end()), set.end());
                const int32_t number = sets.of(set);
                for (const int32_t rank : members)
                    if (!orders[size_t(recording.class_of[size_t(rank)])].collectives[family].empty())
                        keys[size_t(rank)].push_back(number);
            }
        }
        for (size_t rank = 0; rank < ranks; ++rank) {
            const Sequence& mine = recording.of(int64_t(rank));
            for (const CallOrder::Lane& lane : orders[size_t(recording.class_of[rank])].lanes) {
                const int64_t peer = peer_of(groups, mine, lane, int64_t(rank));
                const CallOrder& peers = orders[size_t(recording.class_of[size_t(peer)])];
                keys[rank].push_back(class_of[size_t(peer)]);
                keys[rank].push_back(lane_back(groups, lane, int64_t(rank), recording.of(peer), peers, peer));
            }
        }
        for (size_t rank = 0; rank < ranks; ++rank) class_of[rank] = next.of(keys[rank]);
        if (next.size() == count) return class_of;
        count = next.size();
    }
}

// ---- execution ------------------------------------------------------------------------------------------------------

namespace {

// What of a sequence goes through the rank's stream: its collectives, in the order of their calls; on streams also its
// ring shifts.
struct CallProgram {
    CallProgram(const Sequence& sequence, const CallOrder& calls, Launch launch) : order(&calls) {
        for (size_t i = 0; i < calls.calls.size(); ++i) {
            const CommCall& call = sequence.calls[size_t(calls.calls[i].call)];
            const bool streamed = !call.message() || (call.shift && launch == Launch::on_streams);
            place.push_back(streamed ? int32_t(stream.size()) : -1);
            if (streamed) stream.push_back(int32_t(i));
        }
    }
    const CallOrder* order;
    std::vector<int32_t> stream;  // indices into the order's calls
    std::vector<int32_t> place;   // by call: its index in `stream`; -1: a message, posted at the call
};

// The ranks of a class, in the middle of the execution.
struct State {
    int64_t rank = 0;  // one of them
    const CallProgram* program = nullptr;
    std::vector<int32_t> meeting;                    // by family: an index into meetings
    std::vector<std::pair<int32_t, int32_t>> peers;  // by lane: the peer's class, and its lane back
    size_t at = 0;                                   // the next event
    int32_t called = 0, issued = 0, done = 0;        // of the stream
    bool begun = false;                              // stream[done]
    std::vector<int32_t> posted;                     // by lane: messages
    std::vector<int32_t> waiters;                    // classes that wait for a message of this one
};

// The groups of a family whose members are of these classes. They have one operation at a time.
struct Meeting {
    std::vector<int32_t> classes;
    size_t begun = 0;
};

class Execution {
  public:
    Execution(const Recording& recording, const GroupTable& groups, const std::vector<CallOrder>& orders,
              const std::vector<int32_t>& class_of, Launch launch)
        : recording_(recording), groups_(groups), orders_(orders), class_of_(class_of), launch_(launch) {
        for (size_t i = 0; i < orders.size(); ++i) programs_.emplace_back(recording.sequences[i], orders[i], launch);
        states_.resize(size_t(*std::max_element(class_of.begin(), class_of.end()) + 1));
        std::vector<char> seen(states_.size());
        std::map<std::pair<int32_t, Key>, int32_t> numbers;  // family, classes: an index into meetings_
        for (size_t rank = 0; rank < class_of.size(); ++rank)
            if (!std::exchange(seen[size_t(class_of[rank])], 1)) enter(int64_t(rank), numbers);
    }

    void run() {
        for (size_t i = 0; i < states_.size(); ++i) wake(int32_t(i));
        while (!ready_.empty()) {
            const int32_t next = ready_.front();
            ready_.pop_front();
            queued_[size_t(next)] = 0;
            for (bool moved = true; moved;) {
                moved = run_stream(next);
                moved |= run_calls(next);
            }
        }
    }
    std::string who_waits() const;

  private:
    void enter(int64_t rank, std::map<std::pair<int32_t, Key>, int32_t>& numbers) {
        const size_t sequence = size_t(recording_.class_of[size_t(rank)]);
        const CallOrder& order = orders_[sequence];
        State& state = states_[size_t(class_of_[size_t(rank)])];
        state.rank = rank;
        state.program = &programs_[sequence];
        state.posted.resize(order.lanes.size());
        state.meeting.assign(order.collectives.size(), -1);
        for (size_t family = 0; family < order.collectives.size(); ++family) {
            if (order.collectives[family].empty()) continue;
            Key classes;
            for (const int32_t member : groups_.members(int(family), rank))
                classes.push_back(class_of_[size_t(member)]);
            std::sort(classes.begin(), classes.end());
            classes.erase(std::unique(classes.begin(), classes.end()), classes.end());
            const auto [found, is_new] = numbers.insert({{int32_t(family), classes}, int32_t(meetings_.size())});
            if (is_new) meetings_.push_back({classes});
            state.meeting[family] = found->second;
        }
        for (const CallOrder::Lane& lane : order.lanes) {
            const int64_t peer = peer_of(groups_, recording_.sequences[sequence], lane, rank);
            state.peers.emplace_back(class_of_[size_t(peer)],
                                     lane_back(groups_, lane, rank, recording_.of(peer),
                                               orders_[size_t(recording_.class_of[size_t(peer)])], peer));
        }
    }

    void wake(int32_t which) {
        queued_.resize(states_.size());
        if (std::exchange(queued_[size_t(which)], 1)) return;
        ready_.push_back(which);
    }

    // ---- messages ----
    void post(State& state, const CallOrder::Call& call) {
        if (call.out >= 0) ++state.posted[size_t(call.out)];
        if (call.in >= 0) ++state.posted[size_t(call.in)];
        for (const int32_t waiter : std::exchange(state.waiters, {})) wake(waiter);
    }
    // The class that has not posted the other end of the message yet; -1: both ends are posted.
    int32_t missing(const State& state, const CallOrder::Call& call) const {
        for (const auto& [lane, number] : {std::pair(call.out, call.out_number), std::pair(call.in, call.in_number)}) {
            if (lane < 0) continue;
            const auto& [peer, back] = state.peers[size_t(lane)];
            if (states_[size_t(peer)].posted[size_t(back)] < number) return peer;
        }
        return -1;
    }
    bool complete(int32_t which, const CallOrder::Call& call) {
        const int32_t peer = missing(states_[size_t(which)], call);
        if (peer >= 0) states_[size_t(peer)].waiters.push_back(which);
        return peer < 0;
    }

    // ---- progress of a class; each returns whether there was any ----
    bool run_stream(int32_t which) {
        State& state = states_[size_t(which)];
        bool moved = false;
        while (state.done < state.issued) {
            const CallOrder::Call& call =
                state.program->order->calls[size_t(state.program->stream[size_t(state.done)])];
            const bool begins = !std::exchange(state.begun, true);
            if (call.out >= 0 || call.in >= 0) {
                if (begins) post(state, call);
                if (!complete(which, call)) return moved;
                state.begun = false;
                ++state.done;
            } else {
                if (!begins) return moved;
                Meeting& meeting = meetings_[size_t(state.meeting[size_t(family_of(state, call))])];
                if (++meeting.begun < meeting.classes.size()) return true;
                meeting.begun = 0;
                for (const int32_t member : meeting.classes) {
                    State& other = states_[size_t(member)];
                    CHECK(other.begun, "a collective without rank {}", other.rank);
                    other.begun = false;
                    ++other.done;
                    if (member != which) wake(member);
                }
            }
            moved = true;
        }
        return moved;
    }
    bool run_calls(int32_t which) {
        State& state = states_[size_t(which)];
        const CallOrder& order = *state.program->order;
        const auto issue = [&] { return std::exchange(state.issued, state.called) < state.called; };
        bool moved = false;
        for (; state.at < order.events.size(); ++state.at, moved = true) {
            const int32_t event = order.events[state.at];
            const size_t index = size_t(event >= 0 ? event : ~event);
            const int32_t place = state.program->place[index];
            if (event >= 0 && place < 0) {
                post(state, order.calls[index]);
            } else if (event >= 0) {
                ++state.called;
                if (launch_ == Launch::on_streams) issue();
            } else {
                if (launch_ == Launch::at_waits) moved |= issue();
                if (launch_ == Launch::at_waits && state.done < state.issued) return moved;
                if (place >= 0 ? state.done <= place : !complete(which, order.calls[index])) return moved;
            }
        }
        return issue() || moved;
    }

    int family_of(const State& state, const CallOrder::Call& call) const {
        return recording_.of(state.rank).calls[size_t(call.call)].family;
    }

    // ---- who waits for whom ----
    struct Wait {
        int64_t rank;
        int32_t call;  // an index into the calls of its order
        auto operator<=>(const Wait&) const = default;
    };
    const State& state_of(int64_t rank) const { return states_[size_t(class_of_[size_t(rank)])]; }
    // What holds up a rank, or, if it has called `needed` (-1: none) but not begun it, what holds up that.
    Wait held_up(int64_t rank, int32_t needed) const {
        const State& state = state_of(rank);
        const CallProgram& program = *state.program;
        const auto in_stream = [&] { return Wait{rank, program.stream[size_t(state.done)]}; };
        if (needed >= 0 && program.place[size_t(needed)] >= 0 && program.place[size_t(needed)] < state.issued)
            return in_stream();
        if (state.at == program.order->events.size()) return in_stream();
        const int32_t waited = ~program.order->events[state.at];
        if (launch_ == Launch::at_waits ? state.done < state.issued : program.place[size_t(waited)] >= 0)
            return in_stream();
        return {rank, waited};
    }
    std::vector<Wait> waits_for(const Wait& wait) const;

    const Recording& recording_;
    const GroupTable& groups_;
    const std::vector<CallOrder>& orders_;
    const std::vector<int32_t>& class_of_;
    const Launch launch_;
    std::vector<CallProgram> programs_;
    std::vector<State> states_;
    std::vector<Meeting> meetings_;
    std::deque<int32_t> ready_;
    std::vector<char> queued_;
};

// The ranks without which a call does not complete, with the call that each has not made or begun yet; a few of many.
std::vector<Execution::Wait> Execution::waits_for(const Wait& wait) const {
    const State& state = state_of(wait.rank);
    const CallOrder::Call& call = state.program->order->calls[size_t(wait.call)];
    std::vector<Wait> missing;
    for (const auto& [lane, number] : {std::pair(call.out, call.out_number), std::pair(call.in, call.in_number)}) {
        if (lane < 0) continue;
        const CallOrder::Lane& mine = state.program->order->lanes[size_t(lane)];
        const int64_t peer = peer_of(groups_, recording_.of(wait.rank), mine, wait.rank);
        const State& other = state_of(peer);
        const size_t back = size_t(state.peers[size_t(lane)].second);
        if (other.posted[back] < number)
            missing.push_back({peer, other.program->order->lanes[back].calls[size_t(number - 1)]});
    }
    if (call.out >= 0 || call.in >= 0) return missing;
    const int family = family_of(state, call);
    for (const int32_t member : groups_.members(family, wait.rank)) {
        const State& other = state_of(member);
        const int32_t theirs = other.program->order->collectives[size_t(family)][size_t(call.number - 1)];
        const bool there = other.begun && other.program->stream[size_t(other.done)] == theirs;
        if (!there) missing.push_back({member, theirs});
        if (missing.size() == 64) break;
    }
    return missing;
}

std::string Execution::who_waits() const {
    int64_t first = 0;
    while (first < recording_.ranks && state_of(first).at == state_of(first).program->order->events.size() &&
           state_of(first).done == state_of(first).called)
        ++first;
    if (first == recording_.ranks) return {};
    // All calls match, so whoever is waited for waits itself: the path comes back to itself.
    std::vector<Wait> path = {held_up(first, -1)};
    std::map<Wait, size_t> in_path = {{path[0], 0}};
    for (size_t begin = path.size(); begin == path.size();) {
        const std::vector<Wait> missing = waits_for(path.back());
        CHECK(!missing.empty(), "rank {} waits for nobody", path.back().rank);
        std::optional<Wait> next;
        for (const Wait& needed : missing) {
            const Wait wait = held_up(needed.rank, needed.call);
            if (!next || in_path.contains(wait)) next = wait;
            if (in_path.contains(wait)) break;
        }
        const auto [found, is_new] = in_path.insert({*next, path.size()});
        if (is_new)
            path.push_back(*next), begin = path.size();
        else
            path.erase(path.begin(), path.begin() + int64_t(found->second)), begin = 0;
    }
    constexpr size_t kMost = 6;
    std::string text;
    for (size_t i = 0; i < path.size(); ++i) {
        if (i == kMost) return text + fmt::format("; and so on, {} ranks in all", path.size());
        const State& state = state_of(path[i].rank);
        text += fmt::format(
            "{}rank {} waits in {} for rank {}", text.empty() ? "" : "; ", path[i].rank,
            describe_call(recording_, recording_.of(path[i].rank), state.program->order->calls[size_t(path[i].call)]),
            path[(i + 1) % path.size()].rank);
    }
    return text;
}

}  // namespace

std::string deadlock(const Recording& recording, const GroupTable& groups, const std::vector<CallOrder>& orders,
                     const std::vector<int32_t>& class_of, Launch launch) {
    if (recording.ranks == 0) return {};
    Execution execution(recording, groups, orders, class_of, launch);
    execution.run();
    return execution.who_waits();
}

}  // namespace train70b
