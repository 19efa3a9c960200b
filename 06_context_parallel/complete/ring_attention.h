#pragma once
// Context parallelism: each of N ranks holds 1/N of every sequence's tokens, and they communicate in attention only.
//
// Ring attention (Liu et al. 2023), its formulas and the zigzag: minimal.h. Here the ring is of G groups of ranks, and
// dK and dV, too, travel while the next block is computed. Rows are ordered by chunk, then by sequence, so that one
// chunk of all sequences is a slice of rows.
//
// Ulysses (Jacobs et al. 2023): an all-to-all turns 1/U of the tokens with all heads into all tokens with 1/U of the
// heads, and attention runs as on one device. Hybrid: Ulysses inside groups of U ranks, the ring across the G = N/U
// groups.
//
// R_l = B*T/N rows of this rank
#include "01_single_gpu/complete/data/batches.h"
#include "01_single_gpu/complete/layers.h"
#include "02_data_parallel/comm.h"
#include "06_context_parallel/complete/context_layout.h"

namespace train70b {

// ---- the ring: plain functions of tensors, as attention() of layers.h takes them ----------------------------------
struct RingShape {
    int64_t batch, chunk_len, chunks;  // R_l = chunks * batch * chunk_len
    int64_t heads, kv_heads, head_dim;
    int64_t window = 0;  // sliding; 0: none

    ContextLayout layout(int64_t ranks) const { return {.ranks = ranks, .chunks = chunks}; }
};
// Keys and values of one rank in one buffer, which is one message: (2 R_l, K*D).
Tensor pack(const Tensor& k, const Tensor& v);
// Causal attention over all tokens in the ring, inside documents. ranks: one of each group. q (R_l, H*D), k and v (R_l,
// K*D). Sends 2 R_l*K*D elements ranks.size() - 1 times, with a window ring_steps() - 1 times; so too where documents
// leave nothing to compute in a step, because another rank may need what is passed on.
OutLse ring_attention(const Comm& ranks, const RingShape& shape, const DocumentStarts& documents, const Tensor& q,
                      const Tensor& k, const Tensor& v);
// Sends the same once more, and 2 R_l*K*D elements of fp32 one time more: the gradients return to the rank that
// holds their keys and values.
QKVGrads ring_attention_backward(const Comm& ranks, const RingShape& shape, const DocumentStarts& documents,
                                 const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                 const Tensor& out, const Tensor& lse);

// ---- Ulysses: (R_l, heads*D), 1/U of the tokens <-> (R_l*U, heads/U*D), all tokens of the group ---------------------
struct HeadsShape {
    int64_t batch, chunks, head_dim;
};
// Tape operations. heads: those of x; fewer than U are copied, each to U / heads ranks.
Var to_heads(Tape& tape, const Var& x, const Comm& ranks, const HeadsShape& shape);
Var to_sequence(Tape& tape, const Var& x, const Comm& ranks,
                const HeadsShape& shape);  // the inverse; heads: at least U

}  // namespace train70b
