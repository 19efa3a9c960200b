#pragma once
// The memory of a rank by the formulas of the lessons: what the planner leaves layouts out with, in microseconds.
//
// a, g: bytes of a parameter or activation, of a gradient; n: elements of a unit on the rank, over N shards.
//
//     params        a n, ZeRO-3: a n/N                   grads   g n, from ZeRO-2 on: g n/N        (chapter 03)
//     optimizer     (8 + 4 if a < 4) n, from ZeRO-1 on n/N; adamw8bit: (2 + 8/256 + 4 if a < 4) n  (chapter 07)
//                   muon: 4 bytes less per element of a block's matrices                       (chapter 03)
//     host          offloaded: the optimizer (nvme: on the disk) and (a + g) n/N, for none of it on the device
//     activations   chapter 01's formula for the level of recomputation, times the blocks and micro-batches in flight,
//                   which are read off the schedule's steps (chapter 05), and the worst moment of one block or the head
//     workspace     unsharded: ZeRO-3, a n of the unit in use and of `prefetch` more; from ZeRO-2 on g n of the unit in
//                   use and of the reduction in flight; where W comes later, all units of the chunk
//
// States are exact, but for the scales of 8-bit moments and Muon's shards. The sum is within kFormulaError of a dry
// run's (-R 08_memory_formula), three times that with Muon: layouts near the limit are left to the recording of their
// step (simulate_best.h).
#include "01_single_gpu/core/memory.h"
#include "08_3d_full/complete/layout/config.h"

namespace train70b {

constexpr double kFormulaError = 0.03;

// Peak bytes of a step. The buffers of communication are part of `activations`. rank: in the mesh. The configuration
// must be valid (config.h), and its schedule have a name. Not counted: masks of documents, a device's own workspace.
MemoryPeak memory_formula(const Workload& workload, const ParallelConfig& config, int64_t rank);

// What a rank holds from one step to the next, in bytes.
struct StateMemory {
    int64_t params = 0, grads = 0, optimizer = 0, host = 0, disk = 0;
};
StateMemory state_memory(const Workload& workload, const ParallelConfig& config, int64_t rank);

// What of the model a rank has: layers, and elements of parameters, those divided over ep apart; all shards of them.
struct StageSize {
    int64_t layers = 0, sparse_layers = 0;
    bool head = false;
    double elements = 0, ep_elements = 0;
};
StageSize stage_size(const Workload& workload, const ParallelConfig& config, int64_t rank);

}  // namespace train70b
