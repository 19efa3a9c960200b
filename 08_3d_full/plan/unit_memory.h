#pragma once
// What a unit (embedding, block, head) has and holds of a micro-batch: a model of one block is made with the layout's
// tensor, context and expert parallelism, FP8 and recomputation; its parameters are listed, and while it runs on meta
// tensors the ledger is read. Experts have the same load.
#include "01_single_gpu/core/memory.h"
#include "08_3d_full/complete/layout/config.h"
#include "08_3d_full/plan/memory_formula.h"

namespace train70b {

// A parameter's rectangle on this rank.
struct ParamShape {
    int64_t rows, cols, global_cols, first_row;  // first_row: in the global parameter
    // What its gradient must still be summed over when the step ends: parameters with the same number share a group.
    static constexpr int kNoSum = -1, kTiedSum = INT32_MAX;
    int sum = kNoSum;
    bool counts = true;  // in norms: replica 0
    int64_t begin = 0;   // in the unit's flat buffer
    int64_t size() const { return rows * cols; }
};
struct UnitParams {
    std::vector<ParamShape> embedding, block, head;  // head: without a tied matrix
    std::vector<ParamShape> experts;                 // all of a layer; then `block` is that of a sparse layer
};
// The same object for equal shapes. tp_rank: of mesh.tp.
const UnitParams& unit_params(const LlamaConfig& config, int64_t tp, int64_t tp_rank, bool sequence_parallel);

// What a pass leaves behind and what it needs at most, both on top of what was held when it began.
struct PassMemory {
    MemoryBytes net{};
    int64_t net_total = 0;
    MemoryPeak peak;
};

// A block's experts are a unit inside it: what ZeRO does with them in the middle of the block's passes.
enum class AtExperts { nothing, begin_forward, end_forward, begin_replay, replayed, begin_backward, end_backward };
struct PassPart {
    PassMemory memory;
    AtExperts then = AtExperts::nothing;
};

// The passes of one micro-batch: F, B, and its halves I and W where the schedule splits it. A pass begins when the
// unit's input, or the gradient of its output, is there. F leaves the output, B takes the input and leaves its
// gradient.
struct UnitMemory {
    std::vector<PassPart> forward, backward, backward_input, weights;
};

struct RankUnitMemory {
    UnitMemory embedding, block, head;  // block: with experts, that of a sparse layer
    UnitMemory tied_head;               // tied embeddings: the product, whose unit is not that of the norm
    int64_t block_workspace = 0;        // of each block from step to step: FP8's amaxes and scales; losses of experts
    std::vector<bool> in_8_bits;        // of a block's parameters, in their order: ZeRO gathers them as FP8 data
    int64_t hidden = 0;                 // bytes of the hidden states between stages, (R_l, E)
    int64_t loss = 0;                   // bytes of the loss, which is part of the head's F
};

// The same object for all ranks and layouts whose units are equal. The configuration must be valid (config.h).
const RankUnitMemory& unit_memory(const Workload& workload, const ParallelConfig& config, int64_t rank);

// ---- what a rank holds of the model's units from step to step (memory_state.cpp) ----

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
    UnitState block;  // dense
    int64_t blocks = 0;
    UnitState sparse_block, experts;  // of each of `sparse_blocks` layers
    int64_t sparse_blocks = 0;
};

StateMemory state_memory(const RankUnits& units, const Workload& workload, const ParallelConfig& config);
// Of the gradient norm: 8 bytes for each tensor of which a square is summed.
int64_t norm_bytes(const RankUnits& units, const ParallelConfig& config);
// Of the sums of partial gradients at the end of a step: the largest message.
int64_t partial_gradient_message(const RankUnits& units, const Workload& workload, const ParallelConfig& config);

}  // namespace train70b
