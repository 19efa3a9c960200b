#include "08_3d_full/plan/call_order.h"

#include "01_single_gpu/core/check.h"

namespace train70b {

CallOrder::CallOrder(const Sequence& sequence, size_t families) : collectives(families) {
    std::vector<std::vector<int32_t>> made(families);  // by family: indices into calls
    std::vector<int32_t> messages(families);           // so far
    std::vector<bool> waited;                          // by call
    for (size_t part = 0; part < sequence.parts.size(); ++part) {
        // The pipeline polls its sends (Work::done), which is no wait, and waits for the rest behind its last step.
        if (sequence.parts[part].kind == Sequence::Part::Kind::gradients)
            for (size_t i = 0; i < calls.size(); ++i)
                if (calls[i].out >= 0 && calls[i].in < 0 && !waited[i]) events.push_back(~int32_t(i));
        for (const Event& event : sequence.segments[size_t(sequence.parts[part].segment)]) {
            const int32_t next = int32_t(calls.size());
            if (event.kind == Event::Kind::call) {
                const CommCall& call = sequence.calls[size_t(event.what)];
                const size_t family = size_t(call.family);
                CHECK(family < families, "a call in group family {} of {}", call.family, families);
                Call entry{.call = event.what, .number = 0, .part = int32_t(part)};
                if (call.message()) {
                    entry.number = ++messages[family];
                    if (call.to >= 0) add(call, true, call.to, entry.out, entry.out_number);
                    if (call.from >= 0) add(call, false, call.from, entry.in, entry.in_number);
                } else {
                    collectives[family].push_back(next);
                    entry.number = int32_t(collectives[family].size());
                }
                made[family].push_back(next);
                events.push_back(next);
                calls.push_back(entry);
                waited.push_back(false);
            } else if (event.kind == Event::Kind::wait) {
                CHECK(size_t(event.family) < families, "a wait in group family {} of {}", event.family, families);
                const std::vector<int32_t>& of_family = made[size_t(event.family)];
                if (event.what < 1 || size_t(event.what) > of_family.size()) {
                    wrong = fmt::format("rank {} waits in {} for a call that it has not made", sequence.rank,
                                        to_string(sequence.parts[part]));
                    return;
                }
                const int32_t call = of_family[of_family.size() - size_t(event.what)];
                events.push_back(~call);
                waited[size_t(call)] = true;
            }
        }
    }
}

void CallOrder::add(const CommCall& call, bool out, int32_t peer, int32_t& lane, int32_t& number) {
    const Lane wanted{call.family, call.channel, call.shift, out, peer, {}};
    lane = 0;
    while (size_t(lane) < lanes.size()) {
        const Lane& each = lanes[size_t(lane)];
        if (each.family == wanted.family && each.channel == wanted.channel && each.shift == wanted.shift &&
            each.out == out && each.peer == peer)
            break;
        ++lane;
    }
    if (size_t(lane) == lanes.size()) lanes.push_back(wanted);
    lanes[size_t(lane)].calls.push_back(int32_t(calls.size()));
    number = int32_t(lanes[size_t(lane)].calls.size());
}

// What the ranks of a class share of a ring shift is its distance; of any other message, the peer's rank in the group.
int64_t peer_of(const GroupTable& groups, const Sequence& sequence, const CallOrder::Lane& lane, int64_t rank) {
    const std::vector<int32_t>& group = groups.members(lane.family, rank);
    const int64_t n = int64_t(group.size());
    if (lane.peer >= n) return -1;
    if (!lane.shift) return group[size_t(lane.peer)];
    const std::vector<int32_t>& place = groups.of(lane.family).place;
    const int64_t distance = lane.peer - place[size_t(sequence.rank)];
    return group[size_t(((place[size_t(rank)] + distance) % n + n) % n)];
}

int32_t lane_back(const GroupTable& groups, const CallOrder::Lane& lane, int64_t rank, const Sequence& peers_sequence,
                  const CallOrder& order, int64_t peer) {
    for (size_t i = 0; i < order.lanes.size(); ++i)
        if (order.lanes[i].meets(lane) && peer_of(groups, peers_sequence, order.lanes[i], peer) == rank)
            return int32_t(i);
    return -1;
}

std::string describe_call(const Recording& recording, const Sequence& sequence, const CallOrder::Call& call) {
    const CommCall& c = sequence.calls[size_t(call.call)];
    // A shift's peer is that of the recorded rank.
    const std::string details = c.shift ? c.details.substr(0, c.details.find(" to rank")) : c.details;
    return fmt::format("{}.{} #{}{} in {} ({})", recording.families[size_t(c.family)].name, c.operation, call.number,
                       details, to_string(sequence.parts[size_t(call.part)]), c.where);
}

}  // namespace train70b
