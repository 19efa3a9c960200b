#include "08_3d_full/plan/alike_ranks.h"

#include <algorithm>
#include <set>

#include "08_3d_full/plan/dry_run.h"

namespace train70b {

namespace {

// A rank's channels, in the order of their families.
std::vector<int> channels_of(const Sequence& sequence) {
    std::set<int> channels;
    for (const CommCall& call : sequence.calls)
        if (call.channel) channels.insert(call.family);
    return {channels.begin(), channels.end()};
}

// -1 for the first channel, and so on; other families stay.
int without_stage(int family, const std::vector<int>& channels) {
    const auto found = std::lower_bound(channels.begin(), channels.end(), family);
    return found != channels.end() && *found == family ? -1 - int(found - channels.begin()) : family;
}
int with_stage(int family, const std::vector<int>& channels) {
    return family < 0 ? channels[size_t(-1 - family)] : family;
}

}  // namespace

RankKind kind_of(const TrainOptions& options, const ParallelConfig& config, int64_t rank) {
    const Mesh::Coordinates at = config.mesh.coordinate(rank);
    ParallelConfig plain = config;
    plain.optimizer = ParallelConfig().optimizer;  // whose states tell the size of the rank's shards
    const RankMemory memory = rank_formula(options, plain, rank);
    // Replicas of a parameter are counted by the first of them: of norms, and of key/value heads.
    const int64_t copies = std::max<int64_t>(config.mesh.tp / options.model.kv_heads, 1);
    const int64_t counts = at.tp == 0 ? 0 : at.tp % copies == 0 ? 1 : 2;
    RankKind kind{{at.pp, memory.optimizer, memory.host, memory.disk}, {at.cp, config.tensor.overlap ? at.tp : counts}};
    // Loads are even but for a remainder, which the first ranks of ep get.
    if (options.model.is_sparse()) kind.places.push_back(rank % config.mesh.ep);
    return kind;
}

std::vector<int32_t> AlikeRanks::numbers_of(const Sequence& sequence) {
    const std::vector<int> channels = channels_of(sequence);
    std::vector<int32_t> ops, calls, segments;
    for (const OpCall& op : sequence.ops) ops.push_back(ops_.of(op));
    for (CommCall call : sequence.calls) {
        call.family = without_stage(call.family, channels);
        calls.push_back(calls_.of(call));
    }
    for (Segment segment : sequence.segments) {
        for (Event& event : segment) {
            if (event.kind == Event::Kind::compute) event.what = ops[size_t(event.what)];
            if (event.kind == Event::Kind::call) event.what = calls[size_t(event.what)];
            if (event.kind == Event::Kind::wait) event.family = int16_t(without_stage(event.family, channels));
        }
        segments.push_back(segments_.of(segment));
    }
    return segments;
}

void AlikeRanks::learn(const Places& places, const Sequence& first, const Sequence& other) {
    if (first.parts.size() != other.parts.size()) return;
    const std::vector<int32_t> from = numbers_of(first), to = numbers_of(other);
    std::map<int32_t, int32_t>& becomes = becomes_[places];
    for (size_t i = 0; i < first.parts.size(); ++i) {
        const int32_t image = to[size_t(other.parts[i].segment)];
        const auto [known, is_new] = becomes.insert({from[size_t(first.parts[i].segment)], image});
        if (known->second != image) known->second = -1;
    }
}

std::optional<Sequence> AlikeRanks::derive(const Places& places, const Sequence& first) {
    const std::map<int32_t, int32_t>& becomes = becomes_[places];
    const std::vector<int> channels = channels_of(first);
    Numbering<int32_t> segments;
    std::vector<int32_t> image;  // by segment of first
    for (const int32_t number : numbers_of(first)) {
        const auto known = becomes.find(number);
        if (known == becomes.end() || known->second < 0) return {};
        image.push_back(segments.of(known->second));
    }
    Sequence derived{
        .derived = true, .micro_batches_run = first.micro_batches_run, .segments = {}, .parts = first.parts};
    Numbering<OpCall> ops;
    Numbering<CommCall> calls;
    for (const int32_t number : segments.values)
        for (Event& event : derived.segments.emplace_back(segments_.values[size_t(number)])) {
            if (event.kind == Event::Kind::wait) event.family = int16_t(with_stage(event.family, channels));
            if (event.kind == Event::Kind::compute) event.what = ops.of(ops_.values[size_t(event.what)]);
            if (event.kind != Event::Kind::call) continue;
            CommCall call = calls_.values[size_t(event.what)];
            call.family = with_stage(call.family, channels);
            event.what = calls.of(call);
        }
    derived.ops = std::move(ops.values);
    derived.calls = std::move(calls.values);
    for (Sequence::Part& part : derived.parts) part.segment = image[size_t(part.segment)];
    return derived;
}

}  // namespace train70b
