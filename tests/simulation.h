#pragma once
// Recordings made by hand, and a cluster whose times are plain numbers: an op takes as many seconds as it has FLOPs.
#include <utility>

#include "08_3d_full/plan/simulate.h"
#include "tests/support.h"

namespace train70b::test {

// One rank's sequence, event by event, in one segment per part.
struct Script {
    Sequence sequence;
    std::vector<Event> events;
    std::map<int, std::vector<int32_t>> made;  // by family: the numbers of its calls
    int32_t calls = 0;

    Script& op(double seconds, const std::string& name = "op") {
        sequence.ops.push_back({.name = name, .flops = seconds});
        events.push_back({.kind = Event::Kind::compute, .what = int32_t(sequence.ops.size()) - 1});
        return *this;
    }
    int32_t call(const CommCall& call) {
        sequence.calls.push_back(call);
        events.push_back({.kind = Event::Kind::call, .what = int32_t(sequence.calls.size()) - 1});
        made[call.family].push_back(calls);
        return calls++;
    }
    int32_t collective(int family, int64_t bytes, const std::string& operation = "all_reduce") {
        return call({.family = family, .operation = operation, .bytes = bytes});
    }
    Script& wait(int32_t id) {
        for (const auto& [family, ids] : made)
            for (size_t i = 0; i < ids.size(); ++i)
                if (ids[i] == id)
                    events.push_back(
                        {.kind = Event::Kind::wait, .family = int16_t(family), .what = int32_t(ids.size() - i)});
        return *this;
    }
    Script& book(int64_t bytes) {
        events.push_back({.kind = Event::Kind::book, .bytes = bytes});
        return *this;
    }
    Script& part(Sequence::Part::Kind kind = Sequence::Part::Kind::update, Step step = {}) {
        sequence.parts.push_back({kind, step, int32_t(sequence.segments.size())});
        sequence.segments.push_back(std::exchange(events, {}));
        return *this;
    }
};

// One class per script; ranks[i]: the ranks of script i.
inline Recording recording_of(int64_t ranks, std::vector<GroupFamily> families, std::vector<Script> scripts,
                              const std::function<int(int64_t rank)>& class_of) {
    Recording recording{.ranks = ranks, .families = {{.name = "world"}}};
    recording.families.insert(recording.families.end(), families.begin(), families.end());
    for (Script& script : scripts) {
        if (!script.events.empty()) script.part();
        script.sequence.rank = -1;
        recording.sequences.push_back(std::move(script.sequence));
    }
    for (int64_t rank = 0; rank < ranks; ++rank) {
        const int c = class_of(rank);
        recording.class_of.push_back(c);
        if (recording.sequences[size_t(c)].rank < 0) recording.sequences[size_t(c)].rank = rank;
    }
    return recording;
}

// Every rank sends over a link of its own, and out of its node over one that the node's ranks share. A collective is a
// ring: each rank sends the bytes to the next.
inline SimulationModel plain_model(int64_t ranks, int64_t per_node, double rate, double node_rate, double latency = 0) {
    const int64_t nodes = (ranks + per_node - 1) / per_node;
    SimulationModel model{.op_seconds = [](const OpCall& op) { return op.flops; }, .ranks_per_node = per_node};
    model.links.assign(size_t(ranks), rate);
    model.links.insert(model.links.end(), size_t(nodes), node_rate);
    model.transfer = [=](const CommCall& call, const std::vector<int64_t>& members, int64_t sender) {
        std::map<int, double> loads;
        const auto send = [&](int64_t from, int64_t to) {
            loads[int(from)] += double(call.bytes);
            if (from / per_node != to / per_node) loads[int(ranks + from / per_node)] += double(call.bytes);
        };
        if (call.message())
            send(members[size_t(sender)], members[size_t(call.to)]);
        else
            for (size_t i = 0; i < members.size(); ++i) send(members[i], members[(i + 1) % members.size()]);
        return Transfer{.latency_s = latency, .loads = {loads.begin(), loads.end()}};
    };
    return model;
}

inline double sum_of_parts(const SimulatedStep& step) {
    double sum = step.compute + step.host;
    for (const auto& [name, seconds] : step.exposed) sum += seconds;
    for (const auto& [name, seconds] : step.waiting) sum += seconds;
    return sum;
}

inline bool near(double a, double b, double tolerance = 1e-9) { return std::abs(a - b) <= tolerance * std::abs(b); }

}  // namespace train70b::test
