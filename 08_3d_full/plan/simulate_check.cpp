#include "08_3d_full/plan/simulate_check.h"

#include <algorithm>
#include <map>

#include "01_single_gpu/core/check.h"
#include "08_3d_full/plan/simulate_run.h"

namespace train70b {

// Why a simulation cannot go on: which calls differ, or who waits for whom.
class CallReport {
  public:
    explicit CallReport(const Simulation& simulation) : s_(simulation), groups_(simulation.recording_) {
        for (const Simulation::Site& site : s_.sites_) met_.emplace_back(site.participants.size());
        for (const Simulation::Rank& rank : s_.ranks_) {
            std::vector<Listed>& calls = calls_.emplace_back();
            std::map<std::pair<int, bool>, int64_t> count;
            for (const int32_t index : rank.program->parts) {
                const Sequence::Part& part = rank.sequence->parts[size_t(index)];
                for (const Event& item : rank.program->segments[size_t(part.segment)]) {
                    if (item.kind != Event::Kind::call) continue;
                    const CommCall& call = rank.sequence->calls[size_t(item.what)];
                    const EqualRanks::Use& use = (*rank.uses)[size_t(item.what)];
                    for (const EqualRanks::Meeting& at : use)
                        if (at.site >= 0)
                            met_[size_t(at.site)][size_t(at.participant)].push_back(
                                {int32_t(calls.size()), at.content, &call});
                    calls.push_back({&call, &use, &part, ++count[{call.family, call.message()}]});
                }
            }
        }
    }

    // The first call that meets nothing or something else, in the order of the program; else it is a deadlock.
    std::string text() const {
        std::vector<Call> open;
        for (const Simulation::Rank& rank : s_.ranks_)
            for (size_t i = 0; i < rank.made.size(); ++i)
                if (rank.made[i].end < 0) open.push_back({int32_t(i), rank.rank});
        std::sort(open.begin(), open.end());
        for (const Call& call : open)
            if (const std::string found = difference(call); !found.empty()) return found;
        return fmt::format("these ranks wait for one another, where collectives begin {}: {}",
                           s_.model_.streams ? "on streams (nccl)" : "at the next wait (mpi)", cycle());
    }

  private:
    struct Call {
        int32_t made;  // an index into Rank::made
        int64_t rank;
        auto operator<=>(const Call&) const = default;
    };
    struct Listed {
        const CommCall* call;
        const EqualRanks::Use* use;
        const Sequence::Part* part;
        int64_t number;  // of the family's collectives, or messages
    };
    struct Met {
        int32_t made;
        uint64_t content;
        const CommCall* call;
    };
    struct End {
        int64_t rank;
        bool receives;
        const std::vector<Met>* calls;  // all that the rank makes there
    };
    // A collective, or one direction of a message (its ends: sender, receiver): the ends' calls of this index.
    struct Meeting {
        size_t at;
        std::vector<End> ends;
    };

    size_t class_of(int64_t rank) const { return size_t(s_.equal_.class_of[size_t(rank)]); }
    const Simulation::Rank& rank_of(int64_t rank) const { return s_.ranks_[class_of(rank)]; }
    const Listed& listed(const Call& call) const { return calls_[class_of(call.rank)][size_t(call.made)]; }

    End end(int64_t rank, int32_t site, bool receives) const {
        if (site < 0) return {rank, receives, nullptr};
        const std::vector<EqualRanks::Participant>& all = s_.sites_[size_t(site)].participants;
        const auto at = std::find(all.begin(), all.end(), EqualRanks::Participant{int32_t(class_of(rank)), receives});
        return {rank, receives, &met_[size_t(site)][size_t(at - all.begin())]};
    }
    std::vector<Meeting> meetings(const Call& call) const {
        const auto& [c, use, part, number] = listed(call);
        const Simulation::Rank& rank = rank_of(call.rank);
        const int32_t sends = (*use)[0].site, receives = (*use)[1].site;
        const auto& [at, at_receive] = rank.made[size_t(call.made)].instance;
        const auto peer = [&, c = c](int which) { return groups_.peer(*rank.sequence, *c, which, call.rank); };
        std::vector<Meeting> all;
        if (c->to >= 0) all.push_back({size_t(at), {end(call.rank, sends, false), end(peer(c->to), sends, true)}});
        if (c->from >= 0)
            all.push_back({size_t(at_receive), {end(peer(c->from), receives, false), end(call.rank, receives, true)}});
        if (c->message()) return all;
        all.push_back({size_t(at), {}});
        for (const int32_t member : groups_.members(c->family, call.rank))
            all[0].ends.push_back(end(member, sends, false));
        return all;
    }

    // "tp.all_reduce #17, 4096 fp32 in F3 (04_tensor_parallel/complete/tensor_parallel.cpp:60)"
    std::string text(const Call& call) const {
        const auto& [c, use, part, number] = listed(call);
        // A shift's peer is that of the recorded rank.
        const std::string details = c->details.substr(0, c->shift ? c->details.find(" to rank") : c->details.npos);
        return fmt::format("{} #{}{} in {} ({})", s_.name_of(*c), number, details, to_string(*part), c->where);
    }

    // From those that the call meets, or has to meet later; empty: it does not.
    std::string difference(const Call& call) const {
        const CommCall& c = *listed(call).call;
        const std::vector<int32_t>& members = groups_.members(c.family, call.rank);
        if (members.empty()) return fmt::format("rank {} calls {}, but is in no such group", call.rank, text(call));
        for (const Meeting& meeting : meetings(call)) {
            const std::vector<End>& ends = meeting.ends;
            if (!ends[0].calls)
                return fmt::format("rank {} calls {}, but its group has no rank {}: it has {}", call.rank, text(call),
                                   ends[0].rank < 0 ? c.from : c.to, members.size());
            const std::string found = difference(meeting, c.message());
            if (found.empty()) continue;
            return (c.message()
                        ? fmt::format("message {} from rank {} to rank {}: ", meeting.at + 1, ends[0].rank,
                                      ends[1].rank)
                        : fmt::format("group {} of {} ranks, call {}: ", s_.recording_.families[size_t(c.family)].name,
                                      ends.size(), meeting.at + 1)) +
                   found;
        }
        return "";
    }
    std::string difference(const Meeting& meeting, bool message) const {
        const size_t at = meeting.at;
        const auto content = [&](const End& end) { return at < end.calls->size() ? (*end.calls)[at].content : 0; };
        std::map<uint64_t, int64_t> count;
        for (const End& end : meeting.ends) ++count[content(end)];
        if (count.size() == 1) return "";
        // The first of those that call what most do, and of the others; of a message, the one that calls it.
        const auto rarer = [&](const End& a, const End& b) { return count[content(a)] < count[content(b)]; };
        End usual = *std::max_element(meeting.ends.begin(), meeting.ends.end(), rarer);
        const auto differs = [&](const End& end) { return content(end) != content(usual); };
        End other = *std::find_if(meeting.ends.begin(), meeting.ends.end(), differs);
        if (message && content(usual) == 0) std::swap(usual, other);
        const std::vector<Met>&a = *usual.calls, &b = *other.calls;
        const bool bytes = at < a.size() && at < b.size() && (message || a[at].call->details == b[at].call->details);
        const auto does = [&](const End& end, const std::vector<Met>& calls) {
            if (at >= calls.size())
                return fmt::format("rank {} {} nothing more there{}", end.rank,
                                   !message       ? "calls"
                                   : end.receives ? "receives"
                                                  : "sends",
                                   calls.empty() ? "" : ", after " + text({calls.back().made, end.rank}));
            const CommCall& c = *calls[at].call;
            return fmt::format(
                "rank {} calls {}{}", end.rank, text({calls[at].made, end.rank}),
                bytes ? fmt::format(", {} bytes", end.receives && c.to >= 0 ? c.received : c.bytes) : "");
        };
        return fmt::format("{}, but {}{}", does(usual, a), does(other, b), hint(a, b, at, other.rank));
    }
    // What one edit of the other's list would make it the usual one?
    static std::string hint(const std::vector<Met>& usual, const std::vector<Met>& other, size_t at, int64_t rank) {
        const auto same = [](const Met& a, const Met& b) { return a.content == b.content; };
        const auto rest_equal = [&](size_t a, size_t b) {
            return a <= usual.size() && b <= other.size() &&
                   std::equal(usual.begin() + int64_t(a), usual.end(), other.begin() + int64_t(b), other.end(), same);
        };
        if (rest_equal(at + 1, at)) return fmt::format(" (rank {} leaves out one call)", rank);
        if (rest_equal(at, at + 1)) return fmt::format(" (rank {} makes one call more)", rank);
        if (rest_equal(at + 1, at + 1)) return " (all others match)";
        if (rest_equal(at + 2, at + 2) && same(usual[at], other[at + 1]) && same(usual[at + 1], other[at]))
            return fmt::format(" (rank {} makes two calls in the other order)", rank);
        return "";
    }

    // Without differences, whoever is waited for waits itself: the path from a waiting rank to the one for which it
    // waits comes back to itself.
    std::string cycle() const {
        int64_t first = 0;
        while (rank_of(first).done) ++first;
        std::vector<Call> path = {held_up(first, rank_of(first).blocked)};
        std::map<Call, size_t> place;
        while (place.insert({path.back(), path.size() - 1}).second) {
            const std::vector<Call> missing = missing_at(path.back());
            CHECK(!missing.empty(), "rank {} waits for nobody", path.back().rank);
            const auto known = std::ranges::find_if(missing, [&](const Call& call) { return place.contains(call); });
            path.push_back(known == missing.end() ? missing[0] : *known);
        }
        std::string line;
        for (size_t begin = place[path.back()], i = begin; i + 1 < path.size(); ++i) {
            if (i == begin + 6) return line + fmt::format("; and so on, {} ranks in all", path.size() - 1 - begin);
            line += fmt::format("{}rank {} waits in {} for rank {}", i > begin ? "; " : "", path[i].rank, text(path[i]),
                                path[i + 1].rank);
        }
        return line;
    }
    // The call that has to end before this one can: the earliest on its stream.
    Call held_up(int64_t rank, int32_t made) const {
        const std::vector<Simulation::Made>& all = rank_of(rank).made;
        for (int32_t before = made; before >= 0 && all[size_t(before)].end < 0; before = all[size_t(before)].previous)
            made = before;
        return {made, rank};
    }
    // What holds up the ranks without which a call does not end; a few of many.
    std::vector<Call> missing_at(const Call& call) const {
        const bool message = listed(call).call->message();
        std::vector<Call> missing;
        for (const Meeting& meeting : meetings(call))
            for (const End& end : meeting.ends) {
                const Simulation::Rank& rank = rank_of(end.rank);
                const Call wanted{(*end.calls)[meeting.at].made, end.rank};
                // Without streams a collective has begun only if the rank waits for it.
                const bool begun = wanted.made < int32_t(rank.made.size()) &&
                                   (s_.model_.streams || message || wanted.made == rank.blocked);
                const Call first = held_up(end.rank, begun ? wanted.made : rank.blocked);
                if (first != wanted && missing.size() < 64) missing.push_back(first);
            }
        return missing;
    }

    const Simulation& s_;
    const GroupTable groups_;
    std::vector<std::vector<Listed>> calls_;          // by rank class
    std::vector<std::vector<std::vector<Met>>> met_;  // by site and participant
};

void Simulation::refuse() const { throw CommonError("mismatch: " + CallReport(*this).text()); }

std::string check_calls(const Recording& recording, bool symmetry) {
    const SimulationOptions options{.stream_per_group = false, .symmetry = symmetry};
    SimulationModel model;
    model.transfer = [](const CommCall&, const std::vector<int64_t>&, int64_t) { return Transfer{}; };
    const EqualRanks equal = find_equal_ranks(recording, model, options);
    SimulatedStep step;
    for (const bool streams : {false, true}) {
        model.streams = streams;
        step = Simulation(recording, model, options, equal).run();
    }
    return fmt::format(
        "all {} ranks' {} calls match: every collective on all its ranks, {} messages at both ends; no deadlock, with "
        "mpi or nccl",
        recording.ranks, step.calls, step.messages);
}

}  // namespace train70b
