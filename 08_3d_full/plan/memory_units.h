#pragma once
// The memory of one pass of one unit (embedding, block, head) of one micro-batch: memory_formula.h derives the terms.
#include "07_fp8/scale_layout.h"
#include "08_3d_full/config.h"
#include "08_3d_full/plan/memory_walk.h"
#include "08_3d_full/plan/workload.h"

namespace train70b {

// The linear layers of a block.
enum class Layer { qkv, o, gate_up, down, head };

// This rank's sizes. R rows of a micro-batch, R_l of them under sequence parallelism; widths are those of the
// tensor-parallel rank: q = H_l*D, kv = K_l*D (of keys; as many of values), F_l, V_l.
struct UnitShapes {
    UnitShapes(const Workload& workload, const ParallelConfig& config, int64_t rank);

    int64_t a, s;  // bytes of an activation, of a statistic (1/rms, lse)
    int64_t R, R_l, E, q, kv, F, V, D;
    bool sequence, overlap;  // tensor parallelism over more than one rank
    bool tensor_parallel;
    bool biases, norms;  // of q, k, v; of the heads of q and k
    Recompute recompute;
    bool pointwise() const { return recompute == Recompute::pointwise || recompute == Recompute::selective; }
    bool selective() const { return recompute == Recompute::selective; }

    // Context parallelism: `ring` ranks exchange keys and values, each `chunks` pieces of the sequence; U ranks share
    // the heads.
    int64_t ring = 1, position = 0, chunks = 1, U = 1, chunk_len = 0;
    bool gather = false;
    int64_t attention_rows() const { return R * U; }
    int64_t attention_q() const { return q / U; }
    int64_t attention_kv() const { return std::max(kv / D / U, int64_t(1)) * D; }

    // FP8: which layers, by which scales; gathered: ZeRO-3 gathers the weights in 8 bits.
    bool fp8[5] = {};
    Scaling scaling = Scaling::tensor, weight_scaling = Scaling::tensor;
    bool gathered = false;
    int64_t in(Layer layer) const;
    int64_t out(Layer layer) const;
};

// The passes of one micro-batch: F, B, and its halves I and W where the schedule splits it.
struct UnitMemory {
    PassMemory forward, backward, backward_input, weights;
};
UnitMemory embedding_memory(const UnitShapes& shapes);
UnitMemory block_memory(const UnitShapes& shapes, bool split);
UnitMemory head_memory(const UnitShapes& shapes, bool split);
// Tied embeddings: the norm and the product are two units.
UnitMemory head_norm_memory(const UnitShapes& shapes);
UnitMemory head_product_memory(const UnitShapes& shapes, bool split);

}  // namespace train70b
