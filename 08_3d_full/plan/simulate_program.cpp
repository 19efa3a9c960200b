#include "08_3d_full/plan/simulate_program.h"

#include <algorithm>

#include "08_3d_full/plan/equal_ranks.h"

namespace train70b {

namespace {

class Compiler {
  public:
    Compiler(const Sequence& sequence, const SimulationModel& model, double slow, bool every_op)
        : sequence_(sequence), model_(model), every_op_(every_op) {
        for (const OpCall& op : sequence.ops) {
            // Without streams the host is the device: launching an op is work between two ops.
            const double seconds = model.timed() ? slow * model.op_seconds(op) : 0;
            CHECK(seconds >= 0, "{} takes {} s", op.name, seconds);
            seconds_.push_back(model.streams ? seconds : seconds + model.host_s);
        }
    }
    SimulationProgram program() {
        const std::vector<std::vector<Event>>& segments = sequence_.segments;
        std::vector<int64_t> times(segments.size());
        program_.segments.resize(segments.size());
        bool before = true;
        for (size_t i = 0; i < sequence_.parts.size(); ++i) {
            const Sequence::Part& part = sequence_.parts[i];
            if (part.segment < 0) continue;
            const std::vector<Event>& events = segments[size_t(part.segment)];
            before = before && !simulated(part, model_);
            for (size_t e = 0; before && e < events.size(); ++e)
                if (events[e].kind == Event::Kind::book) program_.held[size_t(events[e].memory)] += events[e].bytes;
            if (!simulated(part, model_)) continue;
            if (times[size_t(part.segment)]++ == 0)
                for (const Event& event : events) add(program_.segments[size_t(part.segment)], event);
            program_.parts.push_back({part.segment, int32_t(i)});
        }
        for (size_t i = 0; i < segments.size(); ++i) {
            if (times[i] == 0 || !model_.timed()) continue;
            std::vector<int64_t> calls(seconds_.size());
            for (const Event& event : segments[i])
                if (event.kind == Event::Kind::compute) ++calls[size_t(event.what)];
            for (size_t op = 0; op < calls.size(); ++op) {
                if (calls[op] == 0) continue;
                SimulatedStep::Op& sum = program_.ops[sequence_.ops[op].name];
                sum.calls += double(times[i] * calls[op]);
                sum.seconds += double(times[i] * calls[op]) * seconds_[op];
            }
        }
        return std::move(program_);
    }

  private:
    void add(std::vector<Item>& items, const Event& event) {
        switch (event.kind) {
            case Event::Kind::compute: {
                if (!model_.timed()) break;
                const bool joins = !every_op_ && !items.empty() && items.back().kind == Item::Kind::compute;
                if (!joins) {
                    items.push_back({.kind = Item::Kind::compute, .what = int32_t(program_.runs.size())});
                    program_.runs.push_back({.op = event.what});
                }
                Run& run = program_.runs[size_t(items.back().what)];
                const double d = seconds_[size_t(event.what)];
                ++run.count;
                run.seconds += d;
                run.squares += d * d;
                // So far: max over i <= count of (i host_s + ops i ... count), of which the next op is a part.
                run.launched = std::max(run.launched, run.count * model_.host_s) + d;
                break;
            }
            case Event::Kind::call: items.push_back({.kind = Item::Kind::call, .what = event.what}); break;
            case Event::Kind::wait:
                items.push_back({.kind = Item::Kind::wait, .family = event.family, .what = event.what});
                break;
            case Event::Kind::book:
                if (!every_op_) break;
                items.push_back({.kind = Item::Kind::book, .what = int32_t(program_.bookings.size())});
                program_.bookings.push_back({event.memory, event.bytes});
                break;
        }
    }

    const Sequence& sequence_;
    const SimulationModel& model_;
    const bool every_op_;
    std::vector<double> seconds_;  // by op
    SimulationProgram program_;
};

}  // namespace

SimulationProgram simulation_program(const Sequence& sequence, const SimulationModel& model, double slow,
                                     bool every_op) {
    return Compiler(sequence, model, slow, every_op).program();
}

}  // namespace train70b
