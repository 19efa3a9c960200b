#include "08_3d_full/plan/sequence.h"

#include "01_single_gpu/core/check.h"

namespace train70b {

size_t Sequence::event_count() const {
    size_t count = 0;
    for (const Part& part : parts) count += segments[size_t(part.segment)].size();
    return count;
}

std::string to_string(const Sequence::Part& part) {
    using Kind = Sequence::Part::Kind;
    switch (part.kind) {
        case Kind::setup: return "setup";
        case Kind::begin: return "begin";
        case Kind::batch: return fmt::format("batch {}", part.step.micro_batch);
        case Kind::schedule_step: return to_string(part.step);
        case Kind::release: return fmt::format("release {}", part.step.micro_batch);
        case Kind::gradients: return "gradients";
        case Kind::update: return "update";
        case Kind::end: return "end";
    }
    return "?";
}

std::vector<int64_t> Recording::members(int family, int64_t rank) const {
    if (family < 0) return {};
    std::vector<int64_t> within;
    const GroupFamily& own = families[size_t(family)];
    if (own.parent < 0) {
        for (int64_t each = 0; each < ranks; ++each) within.push_back(each);
        return within;
    }
    within = members(own.parent, rank);
    const auto place = std::find(within.begin(), within.end(), rank);
    if (place == within.end()) return {};
    const int color = own.colors[size_t(place - within.begin())];
    if (color < 0) return {};
    std::vector<int64_t> group;
    for (size_t i = 0; i < within.size(); ++i)
        if (own.colors[i] == color) group.push_back(within[i]);
    return group;
}

MemoryPeak peak_of(const Sequence& sequence) {
    MemoryBytes now{};
    int64_t total = 0;
    MemoryPeak peak;
    for (const Sequence::Part& part : sequence.parts) {
        if (part.kind == Sequence::Part::Kind::begin) peak = {now, total};
        for (const Event& event : sequence.segments[size_t(part.segment)]) {
            if (event.kind != Event::Kind::book) continue;
            const int kind = int(event.memory);
            now[size_t(kind)] += event.bytes;
            if (event.memory != Memory::host) total += event.bytes;
            peak.kind[size_t(kind)] = std::max(peak.kind[size_t(kind)], now[size_t(kind)]);
            peak.total = std::max(peak.total, total);
        }
    }
    return peak;
}

}  // namespace train70b
