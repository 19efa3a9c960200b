#include <algorithm>
#include <map>

#include "07_fp8/complete/optimizers.h"
#include "08_3d_full/plan/unit_memory.h"

namespace train70b {

std::pair<int64_t, int64_t> UnitState::piece(const ParamShape& param, int64_t of_shard) const {
    const int64_t from = of_shard * part() - param.begin;
    return {std::clamp<int64_t>(from, 0, param.size()), std::clamp<int64_t>(from + part(), 0, param.size())};
}

// Where a parameter begins and ends, and the first shard that may have nothing else.
std::vector<int64_t> UnitState::special_shards() const {
    std::vector<int64_t> list;
    for (const ParamShape& param : params)
        for (const int64_t shard : {param.begin / part(), param.begin / part() + 1})
            if (shard < shards) list.push_back(shard);
    std::sort(list.begin(), list.end());
    list.erase(std::unique(list.begin(), list.end()), list.end());
    return list;
}

RankUnits::RankUnits(const Workload& w, const ParallelConfig& config, int64_t rank) {
    const Mesh& mesh = config.mesh;
    const Mesh::Coordinates at = mesh.coordinate(rank);
    const int64_t all = mesh.dp * mesh.cp;
    const int64_t shards = config.zero.hybrid_shard > 0 ? std::min(config.zero.hybrid_shard, all) : all;
    const int64_t shard = (at.dp * mesh.cp + at.cp) % shards;
    stage = stage_of(config, w.model, rank);
    for (const Chunk& chunk : stage.chunks)
        for (int64_t layer = chunk.first_layer; layer < chunk.end_layer; ++layer)
            ++(w.model.is_sparse(layer) ? sparse_blocks : blocks);

    LlamaConfig dense = w.model;
    dense.experts = {};
    const UnitParams& params = unit_params(dense, mesh.tp, at.tp, config.tensor.sequence_parallel);
    const auto unit_of = [&](const std::vector<ParamShape>& list, int64_t ranks, int64_t rank_of) {
        UnitState state{list, ranks, rank_of};
        for (ParamShape& param : state.params) {
            param.begin = state.size;
            state.size += param.size();
        }
        return state;
    };
    const auto unit = [&](const std::vector<ParamShape>& list) { return unit_of(list, shards, shard); };
    block = unit(params.block);
    if (sparse_blocks > 0) {
        const UnitParams& sparse = unit_params(w.model, mesh.tp, at.tp, config.tensor.sequence_parallel);
        sparse_block = unit(sparse.block);
        std::vector<ParamShape> mine = sparse.experts;
        const int64_t in_stage = rank % mesh.stage_ranks();
        for (ParamShape& param : mine) {
            param.rows /= mesh.ep;
            param.first_row = in_stage % mesh.ep * param.rows;
        }
        const bool own_ranks = mesh.ep > 1 || mesh.tp > 1;
        experts = own_ranks ? unit_of(mine, mesh.edp(), in_stage / mesh.ep) : unit(mine);
    }
    if (stage.head) head = unit(params.head);
    if (!stage.embedding && !(w.model.tied && stage.head)) return;
    embedding = unit(params.embedding);
    if (w.model.tied && stage.embedding != stage.head) {  // two copies of the matrix
        embedding->params[0].sum = ParamShape::kTiedSum;
        embedding->params[0].counts = stage.embedding;
    }
}

namespace {

// Calls body(unit, how many).
template <class Body>
void for_each_unit(const RankUnits& units, const Body& body) {
    if (units.embedding) body(*units.embedding, 1);
    body(units.block, units.blocks);
    body(units.sparse_block, units.sparse_blocks);
    body(units.experts, units.sparse_blocks);
    if (units.head) body(*units.head, 1);
}

// Blocks of elements whose moments share their scales (07_fp8/complete/adamw8bit.h), in elements [begin, end) of a
// parameter: a rectangle of all columns is one run, one of some columns a run per row.
int64_t moment_blocks(const ParamShape& param, int64_t begin, int64_t end, int64_t block) {
    if (begin == end || block == 0) return 0;
    const int64_t first = param.first_row * param.cols;
    if (param.cols == param.global_cols) return (first + end - 1) / block - (first + begin) / block + 1;
    const int64_t rows = (end - 1) / param.cols - begin / param.cols + 1;
    return rows * ((param.cols + block - 2) / block + 1);
}

int64_t optimizer_bytes(const UnitState& unit, const Workload& w, const ParallelConfig& config) {
    const OptimizerEntry& optimizer = find_optimizer(config.optimizer);
    const int64_t of_each = master_bytes(w.dtype) + 2 * size_of(optimizer.moments(w.dtype));
    int64_t bytes = 0;
    for (const ParamShape& param : unit.params) {
        const auto [begin, end] =
            config.zero.stage == 0 ? std::pair<int64_t, int64_t>{0, param.size()} : unit.piece(param, unit.shard);
        bytes += (end - begin) * of_each + 2 * 4 * moment_blocks(param, begin, end, optimizer.scale_block);
    }
    return bytes;
}

}  // namespace

// Of a unit of n elements, padded to a multiple of N shards (ZeRO's stages 1, 2, 3 shard one kind after the other):
//     params     a n, stage 3: a n / N           a: bytes of a parameter, g: of a gradient
//     grads      g n, stages 2 and 3: g n / N
//     optimizer  12 of each element that this rank updates (masters and two moments in fp32; fp32 parameters: 8; 8-bit
//                moments: 4 + 2, and two scales per 256 elements)
//     host       offloaded: the optimizer, and a + g of its shard to work on
StateMemory state_memory(const RankUnits& units, const Workload& w, const ParallelConfig& config) {
    const int64_t a = size_of(w.dtype), g = size_of(w.grad_dtype);
    const int stage = config.zero.stage;
    StateMemory memory;
    int64_t shards = 0;
    for_each_unit(units, [&](const UnitState& unit, int64_t count) {
        memory.params += count * a * (stage == 3 ? unit.part() : unit.padded());
        memory.grads += count * g * (stage >= 2 ? unit.part() : unit.padded());
        memory.optimizer += count * optimizer_bytes(unit, w, config);
        shards += count * unit.part();
    });
    if (config.zero.offload != Offload::none) {
        memory.host = memory.optimizer + (a + g) * shards;
        memory.optimizer = 0;
    }
    if (config.zero.offload == Offload::all) memory.params = memory.grads = 0;
    return memory;
}

// Gradients of which several ranks hold a part are summed in one message per group: of norms under sequence
// parallelism and of the norms of the heads over tp, of k and v over the ranks with copies of a head, of a tied
// matrix. A message of one tensor is the tensor itself.
int64_t partial_gradient_message(const RankUnits& units, const Workload& w, const ParallelConfig& config) {
    struct Message {
        int64_t elements = 0, tensors = 0;
    };
    std::map<int, Message> messages;
    for_each_unit(units, [&](const UnitState& unit, int64_t count) {
        for (const ParamShape& param : unit.params) {
            if (param.sum == ParamShape::kNoSum) continue;
            const auto [begin, end] =
                config.zero.stage < 2 ? std::pair<int64_t, int64_t>{0, param.size()} : unit.piece(param, unit.shard);
            Message& message = messages[param.sum];
            message.elements += count * (end - begin);
            if (end > begin) message.tensors += count;
        }
    });
    int64_t most = 0;
    for (const auto& [group, message] : messages)
        if (message.tensors > 1) most = std::max(most, message.elements * size_of(w.grad_dtype));
    return most;
}

// ZeRO-0 sums shard by shard, so that the order of the sum is that of the other stages.
int64_t norm_bytes(const RankUnits& units, const ParallelConfig& config) {
    std::vector<int64_t> shards = {units.block.shard};
    if (config.zero.stage == 0)
        for_each_unit(units, [&](const UnitState& unit, int64_t) {
            const std::vector<int64_t> special = unit.special_shards();
            shards.insert(shards.end(), special.begin(), special.end());
        });
    int64_t most = 0;
    for (const int64_t shard : shards) {
        int64_t tensors = 0;
        for_each_unit(units, [&](const UnitState& unit, int64_t count) {
            for (const ParamShape& param : unit.params) {
                const auto [begin, end] = unit.piece(param, shard);
                if (param.counts && end > begin) tensors += count;
            }
        });
        most = std::max(most, tensors);
    }
    return 8 * most;
}

StateMemory state_memory(const Workload& workload, const ParallelConfig& config, int64_t rank) {
    return state_memory(RankUnits(workload, config, rank), workload, config);
}

}  // namespace train70b
