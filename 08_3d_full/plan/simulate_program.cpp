#include "08_3d_full/plan/simulate_program.h"

#include <algorithm>

#include "08_3d_full/plan/equal_ranks.h"

namespace train70b {

SimulationProgram simulation_program(const Sequence& sequence, const SimulationModel& model, double slow,
                                     bool every_op) {
    SimulationProgram program;
    std::vector<double> seconds;  // by op
    for (const OpCall& op : sequence.ops) {
        // Without streams the host is the device: launching an op is work between two ops.
        seconds.push_back((model.timed() ? slow * model.op_seconds(op) : 0) + (model.streams ? 0 : model.host_s));
        CHECK(seconds.back() >= 0, "{} takes {} s", op.name, seconds.back());
    }
    const auto compute = [&](std::vector<Item>& items, int32_t op) {
        if (every_op || items.empty() || items.back().kind != Item::Kind::compute) {
            items.push_back({.kind = Item::Kind::compute, .what = int32_t(program.runs.size())});
            program.runs.push_back({.op = op});
        }
        Run& run = program.runs[size_t(items.back().what)];
        const double d = seconds[size_t(op)];
        ++run.count;
        run.seconds += d;
        run.squares += d * d;
        // So far: max over i <= count of (i host_s + ops i ... count), of which the next op is a part.
        run.launched = std::max(run.launched, run.count * model.host_s) + d;
    };
    std::vector<int64_t> times(sequence.segments.size());
    program.segments.resize(sequence.segments.size());
    for (size_t i = 0; i < sequence.parts.size(); ++i) {
        const Sequence::Part& part = sequence.parts[i];
        if (part.segment < 0) continue;
        const std::vector<Event>& events = sequence.segments[size_t(part.segment)];
        if (!simulated(part, model)) {
            for (const Event& event : events)
                if (event.kind == Event::Kind::book && program.parts.empty())
                    program.held[size_t(event.memory)] += event.bytes;
            continue;
        }
        program.parts.push_back({part.segment, int32_t(i)});
        if (times[size_t(part.segment)]++ > 0) continue;
        std::vector<Item>& items = program.segments[size_t(part.segment)];
        for (const Event& event : events) {
            if (event.kind == Event::Kind::compute) {
                if (model.timed()) compute(items, event.what);
            } else if (event.kind == Event::Kind::book) {
                if (!every_op) continue;
                items.push_back({.kind = Item::Kind::book, .what = int32_t(program.bookings.size())});
                program.bookings.push_back({event.memory, event.bytes});
            } else {
                items.push_back({event.kind, event.family, event.what});
            }
        }
    }
    for (size_t i = 0; i < times.size(); ++i) {
        if (times[i] == 0 || !model.timed()) continue;
        std::vector<int64_t> calls(seconds.size());
        for (const Event& event : sequence.segments[i])
            if (event.kind == Event::Kind::compute) ++calls[size_t(event.what)];
        for (size_t op = 0; op < calls.size(); ++op) {
            if (calls[op] == 0) continue;
            SimulatedStep::Op& sum = program.ops[sequence.ops[op].name];
            sum.calls += double(times[i] * calls[op]);
            sum.seconds += double(times[i] * calls[op]) * seconds[op];
        }
    }
    return program;
}

}  // namespace train70b
