#pragma once
// Executes a recording rank by rank, as the program would: the slow, obvious version of
// 08_3d_full/plan/simulate_check.h. Every call does what the ranks of its group do together, when they have all come to
// it.
#include <deque>
#include <map>
#include <tuple>
#include <utility>

#include "08_3d_full/plan/sequence.h"

namespace train70b::test {

class ExecutedRecording {
  public:
    ExecutedRecording(const Recording& recording, bool streams)
        : recording_(recording), groups_(recording), streams_(streams) {
        for (int64_t rank = 0; rank < recording.ranks; ++rank) {
            const Sequence& s = recording.of(rank);
            Rank& mine = ranks_.emplace_back();
            std::map<int, std::vector<size_t>> made;
            for (const Sequence::Part& part : s.parts) {
                if (part.kind == Sequence::Part::Kind::gradients)  // sends that the pipeline has only polled
                    for (size_t i = 0; i < mine.calls.size(); ++i)
                        if (mine.calls[i].to >= 0 && mine.calls[i].from < 0) mine.events.push_back({false, i});
                for (const Event& event : s.segments[size_t(part.segment)]) {
                    if (event.kind == Event::Kind::call) {
                        const CommCall& call = s.calls[size_t(event.what)];
                        made[call.family].push_back(mine.calls.size());
                        mine.events.push_back({true, mine.calls.size()});
                        if (is_host(call)) mine.events.push_back({false, mine.calls.size()});
                        mine.calls.push_back(
                            {&call, peer(call, call.to, s.rank, rank), peer(call, call.from, s.rank, rank)});
                    } else if (event.kind == Event::Kind::wait) {
                        const std::vector<size_t>& calls = made[event.family];
                        if (event.what < 1 || size_t(event.what) > calls.size())
                            ok_ = false;
                        else
                            mine.events.push_back({false, calls[calls.size() - size_t(event.what)]});
                    }
                }
            }
        }
    }

    // Whether all ranks come to the end, and every call met its like.
    bool ends() {
        for (bool moved = true; moved && ok_;) {
            moved = false;
            for (size_t rank = 0; rank < ranks_.size() && ok_; ++rank)
                while (ok_ && step(int64_t(rank))) moved = true;
        }
        for (const Rank& rank : ranks_) ok_ = ok_ && rank.at == rank.events.size() && rank.queue[0].empty();
        for (const auto& [key, mail] : mail_) ok_ = ok_ && mail.sent.size() == mail.received.size();
        return ok_;
    }

  private:
    struct Call {
        const CommCall* call;
        int64_t to, from;  // world ranks; -1: none
        bool done = false, begun = false;
        size_t sent = 0, received = 0;  // the message's index in its mail
    };
    struct Rank {
        std::vector<Call> calls;
        std::vector<std::pair<bool, size_t>> events;  // is a call; which one
        size_t at = 0;
        // Collectives that have been called; on streams also ring shifts, and apart from them what the host does.
        std::deque<size_t> queue[2];
    };
    struct Mail {
        std::vector<int64_t> sent, received;  // bytes
    };
    using Key = std::tuple<int, bool, bool, int64_t, int64_t>;  // family, channel, shift, sender, receiver

    static bool is_host(const CommCall& call) {
        for (const char* name : {"scalar", "barrier", "split", "finish"})
            if (call.operation == name) return true;
        return false;
    }
    size_t queue_of(const CommCall& call) const { return streams_ && is_host(call); }
    int64_t peer(const CommCall& call, int64_t number, int64_t recorded, int64_t rank) {
        if (number < 0) return -1;
        const auto& group = groups_.members(call.family, rank);
        if (number >= int64_t(group.size())) {
            ok_ = false;
            return -1;
        }
        if (call.shift) {
            const auto& place = groups_.of(call.family).place;
            const int64_t n = int64_t(group.size());
            number = (number + place[size_t(rank)] - place[size_t(recorded)] + n) % n;
        }
        return group[size_t(number)];
    }
    Mail& mail(const CommCall& call, int64_t sender, int64_t receiver) {
        return mail_[{call.family, call.channel, call.shift, sender, receiver}];
    }
    void post(int64_t rank, Call& mine) {
        const CommCall& call = *mine.call;
        if (mine.to >= 0) {
            Mail& box = mail(call, rank, mine.to);
            mine.sent = box.sent.size();
            box.sent.push_back(call.bytes);
            if (box.received.size() > mine.sent && box.received[mine.sent] != call.bytes) ok_ = false;
        }
        if (mine.from >= 0) {
            Mail& box = mail(call, mine.from, rank);
            mine.received = box.received.size();
            box.received.push_back(call.to >= 0 ? call.received : call.bytes);
            if (box.sent.size() > mine.received && box.sent[mine.received] != box.received.back()) ok_ = false;
        }
    }
    bool arrived(int64_t rank, const Call& mine) {
        return (mine.to < 0 || mail(*mine.call, rank, mine.to).received.size() > mine.sent) &&
               (mine.from < 0 || mail(*mine.call, mine.from, rank).sent.size() > mine.received);
    }

    // The front of a queue of the rank begins and, if all others are there, completes. Whether anything happened.
    bool run_front(int64_t rank, size_t which) {
        Rank& mine = ranks_[size_t(rank)];
        if (mine.queue[which].empty()) return false;
        Call& front = mine.calls[mine.queue[which].front()];
        const bool begins = !std::exchange(front.begun, true);
        if (front.call->message()) {
            if (begins) post(rank, front);
            if (!arrived(rank, front)) return begins;
            front.done = true;
            mine.queue[which].pop_front();
            return true;
        }
        const auto& members = groups_.members(front.call->family, rank);
        if (members.empty()) return ok_ = false;
        const auto front_of = [&](int64_t other) -> Call* {
            Rank& theirs = ranks_[size_t(other)];
            return theirs.queue[which].empty() ? nullptr : &theirs.calls[theirs.queue[which].front()];
        };
        for (const int32_t member : members) {
            const Call* other = front_of(member);
            if (!other || !other->begun || other->call->message() || other->call->family != front.call->family)
                return begins;
        }
        for (const int32_t member : members) {
            const CommCall& other = *front_of(member)->call;
            if (other.operation != front.call->operation || other.details != front.call->details ||
                other.bytes != front.call->bytes)
                return ok_ = false;
        }
        for (const int32_t member : members) {
            front_of(member)->done = true;
            ranks_[size_t(member)].queue[which].pop_front();
        }
        return true;
    }

    bool step(int64_t rank) {
        Rank& mine = ranks_[size_t(rank)];
        const bool at_end = mine.at == mine.events.size();
        const auto [is_call, index] = at_end ? std::pair(false, size_t(0)) : mine.events[mine.at];
        if ((streams_ || !is_call) && (run_front(rank, 0) || run_front(rank, 1))) return true;
        if (at_end) return false;
        Call& call = mine.calls[index];
        const bool queued = !call.call->message() || (streams_ && call.call->shift);
        if (is_call && queued) {
            mine.queue[queue_of(*call.call)].push_back(index);
        } else if (is_call) {
            post(rank, call);
        } else {
            if (!streams_ && !mine.queue[0].empty()) return false;
            if (queued ? !call.done : !arrived(rank, call)) return false;
        }
        ++mine.at;
        return true;
    }

    const Recording& recording_;
    const GroupTable groups_;
    const bool streams_;
    bool ok_ = true;
    std::vector<Rank> ranks_;
    std::map<Key, Mail> mail_;
};

inline bool executes(const Recording& recording) {
    return ExecutedRecording(recording, false).ends() && ExecutedRecording(recording, true).ends();
}

}  // namespace train70b::test
