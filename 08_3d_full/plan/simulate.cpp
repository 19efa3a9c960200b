#include "08_3d_full/plan/simulate.h"

#include <algorithm>
#include <set>
#include <utility>

#include "01_single_gpu/core/check.h"
#include "08_3d_full/plan/simulate_run.h"

namespace train70b {

SimulationProgram simulation_program(const Sequence& sequence, const SimulationModel& model, double slow,
                                     bool every_op) {
    SimulationProgram program;
    std::vector<double> seconds_of;  // by op
    for (const OpCall& op : sequence.ops) {
        // Without streams the host is the device: launching an op is work between two ops.
        const double seconds = model.timed() ? slow * model.op_seconds(op) : 0;
        CHECK(seconds >= 0, "{} takes {} s", op.name, seconds);
        seconds_of.push_back(model.streams ? seconds : seconds + model.host_s);
    }
    const auto add = [&](std::vector<Event>& items, const Event& event) {
        if (event.kind != Event::Kind::compute) {
            if (event.kind != Event::Kind::book || every_op) items.push_back(event);
            return;
        }
        if (!model.timed()) return;
        if (every_op || items.empty() || items.back().kind != Event::Kind::compute) {
            items.push_back({.kind = Event::Kind::compute, .what = int32_t(program.runs.size())});
            program.runs.push_back({.op = event.what});
        }
        Run& run = program.runs[size_t(items.back().what)];
        const double d = seconds_of[size_t(event.what)];
        ++run.count;
        run.seconds += d;
        run.squares += d * d;
        // So far: max over i <= count of (i host_s + ops i ... count), of which the next op is a part.
        run.launched = std::max(run.launched, run.count * model.host_s) + d;
    };
    const std::vector<std::vector<Event>>& segments = sequence.segments;
    std::vector<int64_t> times(segments.size());
    program.segments.resize(segments.size());
    for (size_t i = 0; i < sequence.parts.size(); ++i) {
        const Sequence::Part& part = sequence.parts[i];
        if (part.segment < 0) continue;
        const size_t id = size_t(part.segment);
        if (simulated(part, model)) {
            if (times[id]++ == 0)
                for (const Event& event : segments[id]) add(program.segments[id], event);
            program.parts.push_back(int32_t(i));
        } else if (program.parts.empty()) {
            for (const Event& event : segments[id])
                if (event.kind == Event::Kind::book) program.held[size_t(event.memory)] += event.bytes;
        }
    }
    for (size_t i = 0; i < segments.size(); ++i) {
        if (times[i] == 0 || !model.timed()) continue;
        std::vector<int64_t> calls(seconds_of.size());
        for (const Event& event : segments[i])
            if (event.kind == Event::Kind::compute) ++calls[size_t(event.what)];
        for (size_t op = 0; op < calls.size(); ++op) {
            if (calls[op] == 0) continue;
            SimulatedStep::Op& sum = program.ops[sequence.ops[op].name];
            sum.calls += double(times[i] * calls[op]);
            sum.seconds += double(times[i] * calls[op]) * seconds_of[op];
        }
    }
    return program;
}

SimulatedStep Simulation::result() {
    SimulatedStep step{.simulated_ranks = int64_t(ranks_.size())};
    for (const Rank& rank : ranks_) step.seconds = std::max(step.seconds, rank.now);
    std::set<std::string> pipeline = {"end"};  // the groups with channels
    for (const Sequence& sequence : recording_.sequences)
        for (const CommCall& call : sequence.calls)
            if (call.channel) pipeline.insert(recording_.families[size_t(call.family)].name);
    for (size_t c = 0; c < ranks_.size(); ++c) {
        const Rank& rank = ranks_[c];
        const double share = double(equal_.count[c]) / double(recording_.ranks);
        step.compute += share * rank.compute;
        step.host += share * rank.host_wait;
        for (size_t family = 0; family < rank.exposed.size(); ++family) {
            const std::string& name = recording_.families[family].name;
            if (rank.exposed[family] > 0) step.exposed[name] += share * rank.exposed[family];
            if (rank.waiting[family] > 0) step.waiting[name] += share * rank.waiting[family];
        }
        for (const Made& made : rank.made)
            step.messages += equal_.count[c] * (rank.sequence->calls[size_t(made.call)].to >= 0);
        step.calls += equal_.count[c] * int64_t(rank.made.size());
        if (rank.now < step.seconds) step.waiting["end"] += share * (step.seconds - rank.now);
        for (const auto& [name, op] : rank.program->ops) {
            step.ops[name].calls += share * op.calls;
            step.ops[name].seconds += share * op.seconds;
        }
    }
    for (const auto& [name, seconds] : step.waiting)
        if (pipeline.contains(name)) step.bubble += seconds / step.seconds;
    for (const int64_t rank : options_.traced) {  // each of them as the rank that was simulated for it
        const int64_t simulated = equal_.representative[size_t(equal_.class_of[size_t(rank)])];
        std::vector<SimulatedStep::Span> spans;
        for (const SimulatedStep::Span& span : spans_)
            if (span.rank == simulated) spans.push_back(span);
        spread_messages(spans);
        for (SimulatedStep::Span& span : spans) {
            step.stream_names[span.stream] = stream_name(span.stream);
            span.rank = rank;
            step.spans.push_back(std::move(span));
        }
        for (SimulatedStep::MemorySample sample : memory_) {
            if (sample.rank != simulated) continue;
            sample.rank = rank;
            step.memory.push_back(sample);
        }
    }
    return step;
}

std::string Simulation::stream_name(int stream) const {
    if (stream < kComputation) return "schedule";
    if (stream == kComputation) return "computation";
    if (stream >= first_message()) return fmt::format("messages {}", stream - first_message());
    const int family = stream - kFirstComm - 1;
    return family < 0 ? "communication" : "communication " + recording_.families[size_t(family)].name;
}

// Messages that are under way at the same time get streams of their own.
void Simulation::spread_messages(std::vector<SimulatedStep::Span>& spans) const {
    std::stable_sort(spans.begin(), spans.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
    std::vector<double> ends;  // by stream, from first_message() on
    for (SimulatedStep::Span& span : spans) {
        if (span.stream != first_message()) continue;
        size_t stream = 0;
        while (stream < ends.size() && ends[stream] > span.begin) ++stream;
        if (stream == ends.size()) ends.push_back(0);
        ends[stream] = span.end;
        span.stream = first_message() + int(stream);
    }
}

SimulatedStep simulate_step(const Recording& recording, const SimulationModel& model,
                            const SimulationOptions& options) {
    for (const auto& [rank, times] : options.slow_ranks)
        if (rank < 0 || rank >= recording.ranks || !(times > 0))
            usage_error("slow rank {}, {} times: there are {} ranks", rank, times, recording.ranks);
    for (const int64_t rank : options.traced)
        if (rank < 0 || rank >= recording.ranks)
            usage_error("no rank {} to trace: there are {} ranks", rank, recording.ranks);
    if (!(options.jitter >= 0 && options.jitter < 1))
        usage_error("a jitter of {}: must be from 0 to 1 (try 0.02)", options.jitter);
    if (options.jitter > 0 && recording.ranks > kMaxJitterRanks)
        usage_error("jitter: {} ranks, each of which would have to be simulated (try at most {} ranks, or no jitter)",
                    recording.ranks, kMaxJitterRanks);
    SimulationModel slowed = model;
    for (const auto& [link, times] : options.slow_links) {
        if (link < 0 || link >= int(model.links.size()) || !(times > 0))
            usage_error("slow link {}, {} times: there are {} links", link, times, model.links.size());
        slowed.links[size_t(link)] /= times;
    }
    return Simulation(recording, slowed, options, find_equal_ranks(recording, slowed, options)).run();
}

// On a cluster file's devices and links.
SimulatedStep simulate_step(const Recording& recording, const ClusterModel& cluster, const SimulationOptions& options) {
    const Network network(cluster, recording.ranks);
    SimulationModel model{.op_seconds = [&](const OpCall& op) { return op_seconds(cluster.device, op); },
                          .transfer = [&](const CommCall& call, const std::vector<int64_t>& members,
                                          int64_t sender) { return network.transfer(call, members, sender); },
                          .host_s = cluster.device.host_s,
                          .streams = cluster.device.streams,
                          .cores = cluster.cores,
                          .ranks_per_node = cluster.one_machine ? recording.ranks : cluster.gpus_per_node};
    for (int link = 0; link < network.links(); ++link) model.links.push_back(network.bytes_per_s(link));
    return simulate_step(recording, model, options);
}

}  // namespace train70b
