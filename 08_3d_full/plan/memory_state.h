#pragma once
// What a rank holds of the model's units from step to step.
#include "08_3d_full/plan/memory_formula.h"
#include "08_3d_full/plan/unit_memory.h"

namespace train70b {

// One unit: its parameters in one flat buffer, padded to a multiple of `shards`, of which this rank has one.
struct UnitState {
    std::vector<ParamShape> params;
    int64_t shards = 1, shard = 0;

    int64_t size = 0;
    int64_t part() const { return (size + shards - 1) / shards; }
    int64_t padded() const { return part() * shards; }
    // Elements of a parameter in a shard: [begin, end) of the parameter.
    std::pair<int64_t, int64_t> piece(const ParamShape& param, int64_t of_shard) const;
    // Some shards, among them those with the most pieces of parameters, and those with most of any parameter.
    std::vector<int64_t> special_shards() const;
};

struct RankUnits {
    RankUnits(const Workload& workload, const ParallelConfig& config, int64_t rank);
    Stage stage;
    std::optional<UnitState> embedding, head;
    UnitState block;
    int64_t blocks = 0;
};

StateMemory state_memory(const RankUnits& units, const Workload& workload, const ParallelConfig& config);
// Of the gradient norm: 8 bytes for each tensor of which a square is summed.
int64_t norm_bytes(const RankUnits& units, const ParallelConfig& config);
// Of the sums of partial gradients at the end of a step: the largest message.
int64_t partial_gradient_message(const RankUnits& units, const Workload& workload, const ParallelConfig& config);

}  // namespace train70b
