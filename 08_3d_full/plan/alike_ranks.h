#pragma once
// Ranks of a stage that need not be run. They differ in where they are along tp and cp, which changes what they do in
// the same way on every stage where the first of them does the same: what that is, is learnt part by part from the
// stages whose ranks were run.
#include <map>
#include <optional>

#include "01_single_gpu/complete/flags/options.h"
#include "08_3d_full/complete/layout/config.h"
#include "08_3d_full/plan/sequence.h"

namespace train70b {

// Ranks of equal kinds differ only in their peers' numbers, and in where a shard cuts parameters.
struct RankKind {
    std::vector<int64_t> stage;   // and the bytes of its shards
    std::vector<int64_t> places;  // along cp and tp, and ep
    auto operator<=>(const RankKind&) const = default;
};
RankKind kind_of(const TrainOptions& options, const ParallelConfig& config, int64_t rank);

class AlikeRanks {
  public:
    using Places = std::vector<int64_t>;  // of the two ranks along cp and tp

    // first and other: of one stage, both run.
    void learn(const Places& places, const Sequence& first, const Sequence& other);
    // The sequence of such another rank of first's stage; empty if a part of first is not known, or has been seen to
    // become different things.
    std::optional<Sequence> derive(const Places& places, const Sequence& first);

  private:
    // Segments, ops and calls are numbered over all sequences. Channels are numbered by their order on a rank: its
    // stage's channels are families of their own.
    using Segment = std::vector<Event>;
    std::vector<int32_t> numbers_of(const Sequence& sequence);

    Numbering<OpCall> ops_;
    Numbering<CommCall> calls_;
    Numbering<Segment> segments_;
    std::map<Places, std::map<int32_t, int32_t>> becomes_;  // segments; -1: not always the same one
};

}  // namespace train70b
