#pragma once
// The memory of any rank of any layout from shapes alone, without a dry run: what the planner prunes with, in
// microseconds.
//
// B batch, T tokens, R = B*T/cp rows of a micro-batch, E hidden, H heads, K key/value heads, D head size, F ffn,
// V vocabulary, N ranks; _l: this rank's part: H_l, K_l (at least one), F_l, V_l under tensor parallelism, R_l = R/tp
// under sequence parallelism (else R). q = H_l D, kv = K_l D. Bytes: a of an activation or parameter, s of a statistic
// (4), g of a gradient.
//
// 1. From step to step (memory_state.cpp). Of a unit of n elements on the rank, over N shards:
//        params      a n, ZeRO-3: a n/N                 grads   g n, from ZeRO-2 on: g n/N
//        optimizer   (8 + 4 if a < 4) n, from ZeRO-1 on n/N; adamw8bit: (2 + 8/256 + 4 if a < 4) n
//        host        offloaded: the optimizer and (a + g) n/N, for none of it on the device
//    FP8 delayed: 12 amaxes and 12 scales per block, 20 bytes each (workspace).
//
// 2. What a unit keeps of a micro-batch between F and B, and what it needs at its worst moment (memory_units.cpp, a
//    line for each term). Kept by a block, activations:
//                                            none   pointwise   selective   full
//        x, the block's input    a R_l E       x        x           x         x
//        1/rms of two norms    2 s R_l         x        x           x
//        normed x              2 a R_l E       x                              (of both norms)
//        qkv           a R (q + 2 kv)       norms       x           x         (before RoPE)
//        q, k, v       a R (q + 2 kv)          x      Ulysses                 (as attention reads them)
//        out, lse      a R q + s R H_l         x        x
//        middle                  a R_l E       x        x           x         (x + attention)
//        gate_up               2 a R F_l       x        x           x
//        h                       a R F_l       x
//    FP8: the inputs of qkv, gate_up, down in 8 bits with their scales instead of normed x and h, where nothing makes
//    those again. Ulysses: q, k, v by heads, of max(K_l/U, 1) key/value heads.
//    The head keeps x, normed x, 1/rms and the logits a R V_l, whose buffer becomes their gradient; the embedding
//    nothing.
//    Moments, on top of what is kept; the last to free a tensor decides which is the worst:
//        head             3 to 5 s R (softmax), d normed x
//        MLP              dh, d gate_up: a R 3 F_l, or h and dh made while gate_up is there
//        norms            d normed x, its part of dx, dx: 3 a R_l E
//        attention        dout, dq, dk, dv: a R (2 q + 2 kv), with what is recomputed: q, k, v, out, lse
//        RoPE             dq, dk, dv and d qkv: 2 a R (q + 2 kv)
//        recompute full   all that the block would keep, then the same moments
//    Other kinds, meanwhile:
//        comm       sequence parallelism: f and g's rows a R E, overlapped: two, and 3 partial sums a R_l E
//                   ring: K and V of two blocks 4 a R kv, backward also three gradients in fp32: 6 s R kv
//                   gather: K and V of all ranks 2 a cp R kv, backward also 2 s cp R kv
//                   Ulysses: what is sent and received, 2 a R q
//        workspace  ring: fp32 sums s R q, and of two chunks' product; gather: K and V in order 2 a T_seen kv
//                   FP8: x, W, dY in 8 bits, row-wise or column-wise, with scales and amaxes
//
// 3. The rank's steps (memory_formula.cpp): micro-batches in flight hold the kept bytes of their chunk, at most
//    in_flight() of the schedule times; B frees them, I keeps until W: dY and X of each product, and what makes X
//    again. Between stages, messages a R_l E: one received ahead per channel. Batches: 12 m R.
//    Blocks are equal, so that the first and the last of them stand for all; and a schedule repeats itself, so that a
//    few times p micro-batches stand for all (gpipe: m in flight by multiplication).
//
// 4. ZeRO's workspace, in the order of the units' passes:
//        params     ZeRO-3: a n of the unit in use, of `prefetch` more, and of those whose W is still to come
//                   (FP8: n, and a times what is not in 8 bits)
//        grads      from ZeRO-2 on: g n of the unit in use, of the bucket's, and of the reduction in flight
//
// 5. The end of the step: one message with the gradients of which every tp rank has a part (norms under sequence
//    parallelism; k and v where heads are copied), comm; 8 bytes per tensor for the norm, workspace.
#include "08_3d_full/config.h"
#include "08_3d_full/plan/workload.h"

namespace train70b {

// Peak bytes of a step, by kind and of their sum, as the ledger books them in a dry run (MemoryPeak). rank: in the
// mesh. The configuration must be valid (validate.h). Not counted: masks of documents, a device's own workspace.
MemoryPeak memory_formula(const Workload& workload, const ParallelConfig& config, int64_t rank);

// What a rank holds from one step to the next, in bytes.
struct StateMemory {
    int64_t params = 0, grads = 0, optimizer = 0, host = 0;
};
StateMemory state_memory(const Workload& workload, const ParallelConfig& config, int64_t rank);

}  // namespace train70b
