#include "08_3d_full/plan/sequence.h"

#include "01_single_gpu/core/check.h"

namespace train70b {

std::string to_string(const Sequence::Part& part) {
    using Kind = Sequence::Part::Kind;
    if (part.kind == Kind::schedule_step) return to_string(part.step);
    constexpr const char* names[] = {"setup", "begin", "batch", "", "release", "gradients", "update", "end"};
    const bool of_micro_batch = part.kind == Kind::batch || part.kind == Kind::release;
    return names[int(part.kind)] + (of_micro_batch ? fmt::format(" {}", part.step.micro_batch) : "");
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
            if (event.memory < Memory::host) total += event.bytes;
            peak.kind[size_t(kind)] = std::max(peak.kind[size_t(kind)], now[size_t(kind)]);
            peak.total = std::max(peak.total, total);
        }
    }
    return peak;
}

std::pair<int64_t, MemoryPeak> largest_rank(const Recording& recording) {
    std::pair<int64_t, MemoryPeak> largest;
    for (const Sequence& sequence : recording.sequences)
        if (const MemoryPeak peak = peak_of(sequence); peak.total > largest.second.total)
            largest = {sequence.rank, peak};
    return largest;
}

GroupTable::GroupTable(const Recording& recording) {
    const size_t ranks = size_t(recording.ranks);
    std::vector<std::vector<int32_t>> world(1);
    for (size_t rank = 0; rank < ranks; ++rank) world[0].push_back(int32_t(rank));
    for (size_t index = 0; index < recording.families.size(); ++index) {
        const GroupFamily& family = recording.families[index];
        CHECK(family.parent < int(index), "family {} is made of family {}", index, family.parent);
        std::vector<int> colors = family.colors;
        if (family.parent < 0 && colors.empty()) colors.resize(ranks);
        Family divided{.group_of = std::vector<int32_t>(ranks, -1), .place = std::vector<int32_t>(ranks, -1)};
        for (const auto& whole : family.parent < 0 ? world : families_[size_t(family.parent)].members) {
            CHECK(whole.size() == colors.size(), "{}: {} colors for a group of {}", family.name, colors.size(),
                  whole.size());
            std::map<int, int32_t> group_of_color;
            for (size_t i = 0; i < whole.size(); ++i) {
                if (colors[i] < 0) continue;
                const auto [found, is_new] = group_of_color.insert({colors[i], int32_t(divided.members.size())});
                if (is_new) divided.members.emplace_back();
                std::vector<int32_t>& group = divided.members[size_t(found->second)];
                divided.group_of[size_t(whole[i])] = found->second;
                divided.place[size_t(whole[i])] = int32_t(group.size());
                group.push_back(whole[i]);
            }
        }
        families_.push_back(std::move(divided));
    }
}

const std::vector<int32_t>& GroupTable::members(int family, int64_t rank) const {
    static const std::vector<int32_t> none;
    const int32_t group = of(family).group_of[size_t(rank)];
    return group < 0 ? none : of(family).members[size_t(group)];
}

int64_t GroupTable::peer(const Sequence& sequence, const CommCall& call, int peer, int64_t rank) const {
    const std::vector<int32_t>& group = members(call.family, rank);
    const int64_t n = int64_t(group.size());
    if (peer >= n) return -1;
    if (!call.shift) return group[size_t(peer)];
    const std::vector<int32_t>& place = of(call.family).place;
    const int64_t distance = peer - place[size_t(sequence.rank)];
    return group[size_t(((place[size_t(rank)] + distance) % n + n) % n)];
}

}  // namespace train70b
