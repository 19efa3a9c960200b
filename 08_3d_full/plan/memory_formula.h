#pragma once
// The memory of any rank of any layout without a dry run: what the planner prunes with, in microseconds.
//
// a, g: bytes of a parameter or activation, of a gradient; n: elements of a unit on the rank, over N shards.
//
// 1. From step to step (memory_state.cpp):
//        params      a n, ZeRO-3: a n/N                 grads   g n, from ZeRO-2 on: g n/N
//        optimizer   (8 + 4 if a < 4) n, from ZeRO-1 on n/N; adamw8bit: (2 + 8/256 + 4 if a < 4) n
//        host        offloaded: the optimizer and (a + g) n/N, for none of it on the device
// 2. What a unit keeps of a micro-batch between F and B, and needs at its worst moment: read off the ledger while one
//    block runs on meta tensors (unit_memory.h).
// 3. The rank's steps (memory_formula.cpp): micro-batches in flight hold the kept bytes of their chunk; B frees them, I
//    keeps until W what W needs. Between stages, messages: one received ahead per channel. Batches: 12 bytes a row.
//    Blocks are equal, so that the first and the last of them stand for all; and a schedule repeats itself, so that a
//    few times p micro-batches stand for all (gpipe: m in flight by multiplication).
// 4. ZeRO's workspace, in the order of the units' passes (memory_zero.h):
//        params      ZeRO-3: a n of the unit in use, of `prefetch` more, and of those whose W is still to come
//                    (FP8: n, and a times what is not in 8 bits)
//        grads       from ZeRO-2 on: g n of the unit in use, of the bucket's, and of the reduction in flight
// 5. The end of the step: one message with the gradients of which every tp rank has a part (norms under sequence
//    parallelism; k and v where heads are copied), comm; 8 bytes per tensor for the norm, workspace.
#include "08_3d_full/complete/layout/config.h"

namespace train70b {

// Peak bytes of a step, by kind and of their sum, as the ledger books them in a dry run (MemoryPeak). rank: in the
// mesh. The configuration must be valid (config.h). Not counted: masks of documents, a device's own workspace.
MemoryPeak memory_formula(const Workload& workload, const ParallelConfig& config, int64_t rank);

// What a rank holds from one step to the next, in bytes.
struct StateMemory {
    int64_t params = 0, grads = 0, optimizer = 0, host = 0;
};
StateMemory state_memory(const Workload& workload, const ParallelConfig& config, int64_t rank);

}  // namespace train70b
