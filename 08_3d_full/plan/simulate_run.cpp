#include "08_3d_full/plan/simulate_run.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/random.h"

namespace train70b {

Simulation::Simulation(const Recording& recording, const SimulationModel& model, const SimulationOptions& options,
                       const EqualRanks& equal)
    : recording_(recording), model_(model), options_(options), equal_(equal), flows_(equal.links) {
    for (const std::vector<EqualRanks::Participant>& participants : equal_.sites)
        sites_.push_back({.participants = participants, .calls = std::vector<int32_t>(participants.size())});
    for (size_t c = 0; c < equal_.representative.size(); ++c) add_rank(c);
}

SimulatedStep Simulation::run() {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) advance(ranks_[rank]);
    while (true) {
        const double begin = begins_.empty() ? kNever : begins_.top().time, end = flows_.next();
        if (begin == kNever && end == kNever) break;
        if (end <= begin) {
            ends(end, running_[size_t(flows_.pop())]);
        } else {
            const Begin event = begins_.top();
            begins_.pop();
            begins(event.time, event.what);
        }
    }
    for (const Rank& rank : ranks_)
        if (!rank.done) refuse();
    return result();
}

void Simulation::add_rank(size_t c) {
    const int64_t number = equal_.representative[c];
    const int32_t sequence = recording_.class_of[size_t(number)];
    const double factor = options_.times_slower(number);
    const bool traced = std::any_of(options_.traced.begin(), options_.traced.end(),
                                    [&](int64_t r) { return equal_.class_of[size_t(r)] == int32_t(c); });
    const auto key = std::tuple(sequence, factor, traced);
    const Sequence& events = recording_.sequences[size_t(sequence)];
    if (!programs_.contains(key)) programs_[key] = simulation_program(events, model_, factor, traced);
    const size_t families = recording_.families.size();
    Rank rank{.sequence = &events, .program = &programs_.at(key), .uses = &equal_.uses[c], .rank = number};
    rank.traced = traced;
    size_t items = 0;
    for (const int32_t part : rank.program->parts)
        items += rank.program->segments[size_t(events.parts[size_t(part)].segment)].size();
    rank.made.reserve(items);
    rank.calls.resize(families);
    rank.last.assign(families + 1, -1);
    rank.exposed.resize(families);
    rank.waiting.resize(families);
    rank.memory = rank.program->held;
    ranks_.push_back(std::move(rank));
}

// A stream per channel, which is a family of its own; one per group, or one for all, for collectives and shifts.
// Numbers, and messages that are no channel's, go through the host.
int Simulation::stream_of(const CommCall& call) const {
    if (!model_.streams || call.of_host()) return kHost;
    if (call.channel) return 1 + call.family;
    if (call.message() && !call.shift) return kHost;
    return options_.stream_per_group ? 1 + call.family : kAllGroups;
}

// ---- a rank ---------------------------------------------------------------------------------------------------------

void Simulation::advance(Rank& rank) {
    if (rank.blocked >= 0) {
        settle(rank, rank.made[size_t(rank.blocked)]);
        rank.blocked = -1;
        if (std::exchange(rank.blocks_host, false)) rank.host = std::max(rank.host, rank.now);
        if (!model_.streams && !launch_queue(rank)) return;
    }
    const SimulationProgram& program = *rank.program;
    while (rank.part < program.parts.size()) {
        const std::vector<Event>& items = program.segments[size_t(part_of(rank).segment)];
        // The pipeline polls its sends (Work::done), which is no wait, and waits for the rest behind its last step.
        if (!model_.timed() && rank.item == 0 && part_of(rank).kind == Sequence::Part::Kind::gradients &&
            !wait_for_rest(rank, rank.polled, false))
            return;
        if (rank.item == items.size()) {
            if (rank.traced)
                trace(rank, -1, to_string(part_of(rank)), std::exchange(rank.begin_of_part, rank.now), rank.now);
            ++rank.part;
            rank.item = 0;
            continue;
        }
        const Event& item = items[rank.item++];
        bool goes_on = true;
        switch (item.kind) {
            case Event::Kind::compute: goes_on = compute(rank, program.runs[size_t(item.what)]); break;
            case Event::Kind::call: goes_on = call(rank, item.what); break;
            case Event::Kind::wait: {
                const std::vector<int32_t>& calls = rank.calls[size_t(item.family)];
                if (item.what <= int32_t(calls.size()))  // else it was made before the step
                    goes_on = wait_for(rank, calls[calls.size() - size_t(item.what)]);
                else if (!model_.timed())
                    throw CommonError(fmt::format("mismatch: rank {} waits in {} for a call that it has not made",
                                                  rank.rank, to_string(part_of(rank))));
                break;
            }
            case Event::Kind::book:
                rank.memory[size_t(item.memory)] += item.bytes;
                if (!memory_.empty() && memory_.back().rank == rank.rank && memory_.back().seconds == rank.now)
                    memory_.back().now = rank.memory;
                else
                    memory_.push_back({rank.rank, rank.now, rank.memory});
                break;
        }
        if (!goes_on) return;
    }
    rank.done = wait_for_rest(rank, rank.finished, true);
}

// Of a run that takes `run.seconds` without jitter: the sum of independent deviations of its ops.
double Simulation::jitter(Rank& rank, const Run& run) const {
    if (options_.jitter == 0) return 0;
    const uint64_t key = random_bits(options_.seed, uint64_t(rank.rank)), i = 2 * rank.jittered++;
    const double u = (double(random_bits(key, i) >> 11) + 0.5) * 0x1p-53;
    const double v = double(random_bits(key, i + 1) >> 11) * 0x1p-53;
    const double normal = std::sqrt(-2 * std::log(u)) * std::cos(2 * std::acos(-1.0) * v);
    return std::max(-run.seconds, options_.jitter * std::sqrt(run.squares) * normal);
}

bool Simulation::compute(Rank& rank, const Run& run) {
    const double more = jitter(rank, run), seconds = run.seconds + more;
    if (equal_.cores[size_t(index_of(rank))] >= 0 && seconds > 0) {
        rank.core_seconds = seconds;
        rank.core_op = run.op;
        begins_.push({rank.now, ++order_, {kCores, index_of(rank)}});
        return false;
    }
    double end = rank.now + seconds;
    if (model_.streams) {
        end = std::max(end, rank.host + run.launched + more);
        rank.host += run.count * model_.host_s;
    }
    trace(rank, kComputation, rank.sequence->ops[size_t(run.op)].name, end - seconds, end);
    rank.compute += seconds;
    rank.host_wait += std::max(0.0, end - seconds - rank.now);
    rank.now = end;
    return true;
}

bool Simulation::call(Rank& rank, int32_t what) {
    const CommCall& call = rank.sequence->calls[size_t(what)];
    if (model_.streams) rank.host += model_.host_s;
    const int32_t id = make(rank, what);
    Made& made = rank.made.back();
    made.ready = made.head = std::max(rank.now, rank.host);
    if (!model_.streams && !call.message()) {
        rank.queue.push_back(id);
        return !call.of_host() || launch_queue(rank);
    }
    const int stream = stream_of(call);
    if (stream == kHost) {
        arrive(rank, made, made.ready);
        if (!model_.streams || !call.of_host()) return true;
        rank.blocked = id;
        rank.blocks_host = true;
        return false;
    }
    made.previous = std::exchange(rank.last[size_t(stream)], id);
    if (made.previous >= 0) {
        Made& previous = rank.made[size_t(made.previous)];
        if (previous.end < 0) {
            previous.next = id;
            return true;
        }
        made.head = std::max(made.ready, previous.end);
    }
    arrive(rank, made, made.head);
    return true;
}

bool Simulation::wait_for(Rank& rank, int32_t id) {
    if (!model_.streams && rank.queued < rank.queue.size()) {
        rank.after_queue = id;
        return launch_queue(rank);
    }
    if (rank.made[size_t(id)].end < 0) {
        rank.blocked = id;
        return false;
    }
    settle(rank, rank.made[size_t(id)]);
    return true;
}

// Without streams: the collectives called so far, one after another, then the call that the rank waits for.
bool Simulation::launch_queue(Rank& rank) {
    if (rank.queued < rank.queue.size()) {
        rank.blocked = rank.queue[rank.queued++];
        Made& made = rank.made[size_t(rank.blocked)];
        made.ready = made.head = rank.now;
        arrive(rank, made, rank.now);
        return false;
    }
    const int32_t after = std::exchange(rank.after_queue, -1);
    return after < 0 || wait_for(rank, after);
}

// The rank has waited until the call's end: for whom, back along the call's stream.
void Simulation::settle(Rank& rank, const Made& waited) {
    double t = waited.end;
    for (const Made* made = &waited; t > rank.now;) {
        const size_t family = size_t(rank.sequence->calls[size_t(made->call)].family);
        const double start = std::min(t, std::max(made->start, rank.now));
        const double head = std::min(start, std::max(made->head, rank.now));
        rank.exposed[family] += t - start;
        rank.waiting[family] += start - head;
        t = head;
        const Made* previous = made->previous < 0 ? nullptr : &rank.made[size_t(made->previous)];
        if (!previous || previous->end < t) {
            rank.host_wait += t - rank.now;  // its launch was late
            break;
        }
        made = previous;
    }
    rank.now = std::max(rank.now, waited.end);
}

// What nobody has waited for, all of it or what has been sent.
bool Simulation::wait_for_rest(Rank& rank, size_t& next, bool all) {
    while (next < rank.made.size()) {
        const int32_t id = int32_t(next++);
        const CommCall& call = rank.sequence->calls[size_t(rank.made[size_t(id)].call)];
        if ((all || (call.to >= 0 && call.from < 0)) && !wait_for(rank, id)) return false;
    }
    return true;
}

// ---- sites ----------------------------------------------------------------------------------------------------------

int32_t Simulation::make(Rank& rank, int32_t what) {
    const EqualRanks::Use& use = (*rank.uses)[size_t(what)];
    const int32_t id = int32_t(rank.made.size());
    Made& made = rank.made.emplace_back();
    made.call = what;
    for (size_t end = 0; end < use.size(); ++end) {
        if (use[end].site < 0) continue;
        Site& site = sites_[size_t(use[end].site)];
        const size_t participants = site.participants.size(), participant = size_t(use[end].participant);
        made.instance[end] = site.calls[participant]++;
        ++made.pending;
        if (made.instance[end] == int32_t(site.instances.size())) {
            site.instances.push_back({.content = use[end].content});
            site.made.resize(site.instances.size() * participants, -1);
        }
        site.made[size_t(made.instance[end]) * participants + participant] = id;
        if (site.instances[size_t(made.instance[end])].content != use[end].content) refuse();
    }
    const CommCall& call = rank.sequence->calls[size_t(what)];
    if (made.pending < (call.to >= 0 && call.from >= 0 ? 2 : 1)) refuse();
    rank.calls[size_t(call.family)].push_back(id);
    return id;
}

void Simulation::arrive(Rank& rank, const Made& made, double time) {
    const EqualRanks::Use& use = (*rank.uses)[size_t(made.call)];
    for (size_t end = 0; end < use.size(); ++end) {
        if (use[end].site < 0) continue;
        Site& site = sites_[size_t(use[end].site)];
        Instance& instance = site.instances[size_t(made.instance[end])];
        instance.start = std::max(instance.start, time);
        // Of an all-to-all to which the ranks bring different bytes: the most.
        const int32_t transfer = use[end].transfer;
        if (transfer >= 0 && (instance.transfer < 0 || equal_.transfers[size_t(transfer)].bytes >
                                                           equal_.transfers[size_t(instance.transfer)].bytes))
            instance.transfer = transfer;
        if (++instance.arrived < int32_t(site.participants.size())) continue;
        CHECK(instance.transfer >= 0, "a message without a sender");
        const double latency = equal_.transfers[size_t(instance.transfer)].latency_s;
        begins_.push({instance.start + latency, ++order_, {use[end].site, made.instance[end]}});
    }
}

// The first byte of a transfer; or a rank begins to compute on cores that others use.
void Simulation::begins(double now, What what) {
    const bool cores = what.site == kCores;
    const int32_t id = cores ? equal_.cores[size_t(what.instance)]
                             : sites_[size_t(what.site)].instances[size_t(what.instance)].transfer;
    const SharedTransfer& transfer = equal_.transfers[size_t(id)];
    if (transfer.loads.empty()) return ends(now, what);
    const double bytes = cores ? ranks_[size_t(what.instance)].core_seconds : transfer.bytes;
    const size_t flow = size_t(flows_.add(now, bytes, transfer.loads));
    running_.resize(std::max(running_.size(), flow + 1));
    running_[flow] = what;
}

void Simulation::ends(double now, What what) {
    if (what.site == kCores) {
        Rank& rank = ranks_[size_t(what.instance)];
        trace(rank, kComputation, rank.sequence->ops[size_t(rank.core_op)].name, rank.now, now);
        rank.compute += now - rank.now;
        rank.now = now;
        return advance(rank);
    }
    const Site& site = sites_[size_t(what.site)];
    const size_t participants = site.participants.size();
    const double start = site.instances[size_t(what.instance)].start;
    resumed_.clear();
    for (size_t i = 0; i < participants; ++i) {
        const int32_t id = site.made[size_t(what.instance) * participants + i];
        const int32_t index = site.participants[i].rank_class;
        Rank& rank = ranks_[size_t(index)];
        Made& made = rank.made[size_t(id)];
        made.start = std::max(made.start, start);
        if (--made.pending > 0) continue;
        made.end = now;
        const CommCall& call = rank.sequence->calls[size_t(made.call)];
        if (rank.traced) {
            const int stream = model_.streams ? stream_of(call) : call.message() ? kHost : kAllGroups;
            const bool message = stream == kHost || call.channel;
            trace(rank, message ? first_message() : kFirstComm + stream, name_of(call), made.start, now);
        }
        if (made.next >= 0) {
            Made& next = rank.made[size_t(made.next)];
            next.head = std::max(next.ready, now);
            arrive(rank, next, next.head);
        }
        if (rank.blocked == id) resumed_.push_back(index);
    }
    for (const int32_t index : resumed_) advance(ranks_[size_t(index)]);
}

}  // namespace train70b
