#include "08_3d_full/plan/check_calls.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>

#include "01_single_gpu/core/check.h"
#include "08_3d_full/plan/check_deadlock.h"
#include "08_3d_full/plan/sequence.h"

namespace train70b {

namespace {

// The tensor that a message sends or receives, ", 4096 fp32", out of its details.
std::string tensor_of(const CommCall& call, bool out) {
    const std::string& text = call.details;
    if (out || call.shift) return text.substr(0, std::min(text.find(" to rank"), text.find(" shifted to")));
    const size_t end = text.find(" from rank");
    const size_t begin = call.to >= 0 ? text.rfind(", ", end) : 0;
    return begin == text.npos ? text : text.substr(begin, end == text.npos ? end : end - begin);
}

using CallIds = std::vector<int32_t>;

class Matcher {
  public:
    Matcher(const Recording& recording, const GroupTable& groups, const std::vector<CallOrder>& orders)
        : recording_(recording), groups_(groups), orders_(orders) {}

    std::optional<Mismatch> first() {
        match_groups_of_calls();
        match_splits();
        match_collectives();
        match_messages();
        return earliest_ < 0 ? std::optional<Mismatch>() : Mismatch{text_};
    }

  private:
    const CallOrder& order_of(int64_t rank) const { return orders_[size_t(recording_.class_of[size_t(rank)])]; }
    std::string call(int64_t rank, int32_t index) const {
        return describe_call(recording_, recording_.of(rank), order_of(rank).calls[size_t(index)]);
    }
    // Keeps the mismatch that comes first in the program. `at`: of a rank's calls.
    template <class Text>
    void found(int64_t at, const Text& text) {
        if (earliest_ >= 0 && earliest_ <= at) return;
        earliest_ = at;
        text_ = text();
    }

    void match_groups_of_calls();
    void match_splits();
    void match_collectives();
    void compare(int family, const std::vector<int32_t>& members, const std::vector<int32_t>& list_of);
    std::string difference(int family, int64_t usual, int64_t other, size_t at) const;
    void match_messages();
    std::string leftover(int64_t rank, int32_t index, int64_t peer, int32_t last, bool out) const;

    const Recording& recording_;
    const GroupTable& groups_;
    const std::vector<CallOrder>& orders_;
    std::vector<CallIds> kind_of_;  // by sequence and call: equal for calls that may meet in a collective
    int64_t earliest_ = -1;
    std::string text_;
};

// A rank calls only in groups that it is in, and sends only to ranks that there are.
void Matcher::match_groups_of_calls() {
    for (int64_t rank = 0; rank < recording_.ranks; ++rank) {
        const CallOrder& order = order_of(rank);
        const auto in_group = [&](int family) { return groups_.of(family).group_of[size_t(rank)] >= 0; };
        for (size_t family = 0; family < order.collectives.size(); ++family)
            if (const CallIds& calls = order.collectives[family]; !calls.empty() && !in_group(int(family)))
                found(calls[0], [&] {
                    return fmt::format("rank {} calls {}, but is in no such group", rank, call(rank, calls[0]));
                });
        for (const CallOrder::Lane& lane : order.lanes)
            if (peer_of(groups_, recording_.of(rank), lane, rank) < 0)
                found(lane.calls[0], [&] {
                    return fmt::format("rank {} calls {}, but its group has no rank {}: it has {}", rank,
                                       call(rank, lane.calls[0]), lane.peer, groups_.members(lane.family, rank).size());
                });
    }
}

// The families are made by the splits, in their order: it must be one order on all ranks, across groups.
void Matcher::match_splits() {
    std::vector<CallIds> splits_of;  // by sequence
    bool recorded = false;
    for (size_t i = 0; i < orders_.size(); ++i) {
        CallIds& splits = splits_of.emplace_back();
        for (size_t k = 0; k < orders_[i].calls.size(); ++k)
            if (recording_.sequences[i].calls[size_t(orders_[i].calls[k].call)].operation == "split")
                splits.push_back(int32_t(k));
        recorded = recorded || !splits.empty();
    }
    for (int64_t rank = 0; recorded && rank < recording_.ranks; ++rank) {
        const size_t count = recording_.families.size();
        size_t next = 0;  // family in whose split this rank takes part
        const auto to_next = [&] {
            while (++next < count)
                if (groups_.of(std::max(recording_.families[next].parent, 0)).group_of[size_t(rank)] >= 0) return;
        };
        to_next();
        for (const int32_t index : splits_of[size_t(recording_.class_of[size_t(rank)])]) {
            const CommCall& split = recording_.of(rank).calls[size_t(order_of(rank).calls[size_t(index)].call)];
            const auto text = [&] {
                return fmt::format("rank {} calls {}, but {}", rank, call(rank, index),
                                   next < count
                                       ? fmt::format("the split into {} comes first", recording_.families[next].name)
                                       : "the ranks have made all their groups");
            };
            if (next == count || split.family != std::max(recording_.families[next].parent, 0) ||
                split.details != " into " + recording_.families[next].name)
                return found(index, text);
            to_next();
        }
    }
}

// ---- collectives ----------------------------------------------------------------------------------------------------

void Matcher::match_collectives() {
    Numbering<std::tuple<std::string, std::string, int64_t>> kinds;
    for (const Sequence& sequence : recording_.sequences) {
        CallIds& mine = kind_of_.emplace_back();
        for (const CommCall& each : sequence.calls)
            mine.push_back(kinds.of({each.operation, each.details, each.uneven ? -1 : each.bytes}));
    }
    for (size_t family = 0; family < recording_.families.size(); ++family) {
        Numbering<CallIds> lists;
        CallIds list_of;  // by sequence: its list of collectives in this family
        for (size_t i = 0; i < orders_.size(); ++i) {
            CallIds list;
            for (const int32_t each : orders_[i].collectives[family])
                list.push_back(kind_of_[i][size_t(orders_[i].calls[size_t(each)].call)]);
            list_of.push_back(lists.of(list));
        }
        std::set<CallIds> compared;
        for (const std::vector<int32_t>& members : groups_.of(int(family)).members) {
            CallIds different;
            for (const int32_t rank : members) different.push_back(list_of[size_t(recording_.class_of[size_t(rank)])]);
            std::sort(different.begin(), different.end());
            if (different.front() == different.back() || !compared.insert(different).second) continue;
            compare(int(family), members, list_of);
        }
    }
}

// Some members of the group have another list than most.
void Matcher::compare(int family, const std::vector<int32_t>& members, const std::vector<int32_t>& list_of) {
    const auto list = [&](int32_t rank) { return list_of[size_t(recording_.class_of[size_t(rank)])]; };
    std::map<int32_t, int64_t> count;
    for (const int32_t rank : members) ++count[list(rank)];
    const int32_t usual = *std::max_element(members.begin(), members.end(), [&](int32_t a, int32_t b) {
        return count[list(a)] < count[list(b)];  // the first of the most frequent
    });
    const auto kind = [&](int32_t rank, size_t i) {
        const CallOrder& order = order_of(rank);
        return kind_of_[size_t(recording_.class_of[size_t(rank)])]
                       [size_t(order.calls[size_t(order.collectives[size_t(family)][i])].call)];
    };
    std::set<int32_t> done = {list(usual)};
    for (const int32_t other : members) {
        if (!done.insert(list(other)).second) continue;
        const CallIds& a = order_of(usual).collectives[size_t(family)];
        const CallIds& b = order_of(other).collectives[size_t(family)];
        size_t at = 0;
        while (at < a.size() && at < b.size() && kind(usual, at) == kind(other, at)) ++at;
        found(at < a.size() ? a[at] : b[at], [&] {
            // What one edit of the other's list would make it the usual one?
            const auto rest_equal = [&](size_t from_a, size_t from_b) {
                if (from_a > a.size() || from_b > b.size() || a.size() - from_a != b.size() - from_b) return false;
                while (from_a < a.size())
                    if (kind(usual, from_a++) != kind(other, from_b++)) return false;
                return true;
            };
            std::string hint;
            if (rest_equal(at + 1, at))
                hint = fmt::format(" (rank {} leaves out one call)", other);
            else if (rest_equal(at, at + 1))
                hint = fmt::format(" (rank {} makes one call more)", other);
            else if (rest_equal(at + 1, at + 1))
                hint = " (all others of the group match)";
            else if (rest_equal(at + 2, at + 2) && kind(usual, at) == kind(other, at + 1) &&
                     kind(usual, at + 1) == kind(other, at))
                hint = fmt::format(" (rank {} makes two calls in the other order)", other);
            return difference(family, usual, other, at) + hint;
        });
    }
}

std::string Matcher::difference(int family, int64_t usual, int64_t other, size_t at) const {
    const auto call_of = [&](int64_t rank) -> const CommCall* {
        const CallIds& calls = order_of(rank).collectives[size_t(family)];
        if (at >= calls.size()) return nullptr;
        return &recording_.of(rank).calls[size_t(order_of(rank).calls[size_t(calls[at])].call)];
    };
    const CommCall *a = call_of(usual), *b = call_of(other);
    const bool bytes = a && b && a->operation == b->operation && a->details == b->details;
    const auto does = [&](int64_t rank) {
        const CallIds& calls = order_of(rank).collectives[size_t(family)];
        if (at < calls.size())
            return fmt::format("rank {} calls {}{}", rank, call(rank, calls[at]),
                               bytes ? fmt::format(", {} bytes", call_of(rank)->bytes) : "");
        return fmt::format("rank {} calls nothing more there{}", rank,
                           calls.empty() ? "" : fmt::format(", after {}", call(rank, calls.back())));
    };
    return fmt::format("group {} of {} ranks, call {}: {}, but {}", recording_.families[size_t(family)].name,
                       groups_.members(family, usual).size(), at + 1, does(usual), does(other));
}

// ---- messages -------------------------------------------------------------------------------------------------------

void Matcher::match_messages() {
    Numbering<std::pair<int64_t, std::string>> kinds;
    Numbering<CallIds> lists;
    std::vector<std::vector<int32_t>> list_of;  // by sequence and lane: what is sent or received
    const auto kind = [&](const Sequence& sequence, const CallOrder::Call& each, bool out) {
        const CommCall& c = sequence.calls[size_t(each.call)];
        return kinds.of({out || c.to < 0 ? c.bytes : c.received, tensor_of(c, out)});
    };
    for (size_t i = 0; i < orders_.size(); ++i) {
        CallIds& mine = list_of.emplace_back();
        for (const CallOrder::Lane& lane : orders_[i].lanes) {
            CallIds list;
            for (const int32_t each : lane.calls)
                list.push_back(kind(recording_.sequences[i], orders_[i].calls[size_t(each)], lane.out));
            mine.push_back(lists.of(list));
        }
    }
    for (int64_t rank = 0; rank < recording_.ranks; ++rank) {
        const size_t mine = size_t(recording_.class_of[size_t(rank)]);
        for (size_t i = 0; i < orders_[mine].lanes.size(); ++i) {
            const CallOrder::Lane& lane = orders_[mine].lanes[i];
            const int64_t peer = peer_of(groups_, recording_.sequences[mine], lane, rank);
            if (peer < 0) continue;
            const size_t theirs = size_t(recording_.class_of[size_t(peer)]);
            const int32_t back = lane_back(groups_, lane, rank, recording_.sequences[theirs], orders_[theirs], peer);
            if (back < 0) {
                found(lane.calls[0], [&] { return leftover(rank, lane.calls[0], peer, -1, lane.out); });
                continue;
            }
            if (!lane.out || list_of[mine][i] == list_of[theirs][size_t(back)]) continue;
            const CallOrder::Lane& other = orders_[theirs].lanes[size_t(back)];
            size_t at = 0;
            const auto kind_at = [&](size_t sequence, const CallOrder::Lane& of) {
                return kind(recording_.sequences[sequence], orders_[sequence].calls[size_t(of.calls[at])], of.out);
            };
            while (at < lane.calls.size() && at < other.calls.size() && kind_at(mine, lane) == kind_at(theirs, other))
                ++at;
            if (at == lane.calls.size()) {
                found(other.calls[at], [&] { return leftover(peer, other.calls[at], rank, lane.calls.back(), false); });
            } else if (at == other.calls.size()) {
                found(lane.calls[at], [&] { return leftover(rank, lane.calls[at], peer, other.calls.back(), true); });
            } else {
                found(lane.calls[at], [&] {
                    const auto bytes = [&](size_t sequence, const CallOrder::Lane& of) {
                        const CommCall& c = recording_.sequences[sequence]
                                                .calls[size_t(orders_[sequence].calls[size_t(of.calls[at])].call)];
                        return of.out || c.to < 0 ? c.bytes : c.received;
                    };
                    return fmt::format(
                        "message {} from rank {} to rank {}: rank {} sends {} bytes with {}, but rank {} "
                        "receives {} with {}",
                        at + 1, rank, peer, rank, bytes(mine, lane), call(rank, lane.calls[at]), peer,
                        bytes(theirs, other), call(peer, other.calls[at]));
                });
            }
        }
    }
}

// last: the last call of the peer that meets calls of this kind; -1: there is none.
std::string Matcher::leftover(int64_t rank, int32_t index, int64_t peer, int32_t last, bool out) const {
    return fmt::format(
        "rank {} calls {}, but rank {} {} it{}", rank, call(rank, index), peer, out ? "never receives" : "never sends",
        last < 0 ? std::string() : fmt::format("; its last {} is {}", out ? "receive" : "send", call(peer, last)));
}

}  // namespace

std::optional<Mismatch> mismatch(const Recording& recording, const MatchOptions& options) {
    CHECK(int64_t(recording.class_of.size()) == recording.ranks, "{} classes for {} ranks", recording.class_of.size(),
          recording.ranks);
    const GroupTable groups(recording);
    std::vector<CallOrder> orders;
    for (const Sequence& sequence : recording.sequences) {
        orders.emplace_back(sequence, recording.families.size());
        if (!orders.back().wrong.empty()) return Mismatch{orders.back().wrong};
    }
    if (std::optional<Mismatch> wrong = Matcher(recording, groups, orders).first()) return wrong;
    const std::vector<int32_t> class_of =
        equal_ranks(recording, groups, orders, recording.ranks <= options.rank_by_rank);
    for (const Launch launch : {Launch::at_waits, Launch::on_streams}) {
        const std::string ranks = deadlock(recording, groups, orders, class_of, launch);
        if (ranks.empty()) continue;
        return Mismatch{fmt::format("these ranks wait for one another, where collectives begin {}: {}",
                                    launch == Launch::at_waits ? "at the next wait (mpi)" : "on streams (nccl)",
                                    ranks)};
    }
    return {};
}

std::string match_text(const Recording& recording) {
    std::vector<std::array<int64_t, 2>> of_sequence;  // calls; messages sent
    for (const Sequence& sequence : recording.sequences) {
        auto& [calls, messages] = of_sequence.emplace_back();
        for (const Sequence::Part& part : sequence.parts)
            for (const Event& event : sequence.segments[size_t(part.segment)]) {
                if (event.kind != Event::Kind::call) continue;
                ++calls;
                messages += sequence.calls[size_t(event.what)].to >= 0;
            }
    }
    int64_t calls = 0, messages = 0;
    for (const int32_t each : recording.class_of) {
        calls += of_sequence[size_t(each)][0];
        messages += of_sequence[size_t(each)][1];
    }
    return fmt::format(
        "all {} ranks' {} calls match: every collective on all its ranks, {} messages at both ends; no "
        "deadlock, with mpi or nccl",
        recording.ranks, calls, messages);
}

std::string matched(const Recording& recording) {
    if (const std::optional<Mismatch> wrong = mismatch(recording)) throw CommonError("mismatch: " + wrong->text);
    return match_text(recording);
}

}  // namespace train70b
