#pragma once
// Context parallelism: each of N ranks holds 1/N of every sequence's tokens, and attention is what they do together.
//
// Ring attention (Liu et al. 2023). Keys and values go round; each rank attends to the ones it has while the next are
// on their way, and merges what it gets. For two sets of keys, o1, o2 their outputs and l1, l2 the logarithms of their
// sums of exponentials:
//     l = log(e^l1 + e^l2)        o = o1 e^(l1 - l) + o2 e^(l2 - l)
// Backward, with the l and o of the whole ring, each block's share is that of one device; dK and dV travel with their
// block.
//
// Who holds what (G groups in the ring; T tokens): with `chunks` = 1 the g-th stretch, and causal attention leaves the
// first rank next to nothing to do; with 2 (zigzag) stretches g and 2G-1-g of 2G, and all have equally much. Rows lie
// chunk by chunk, in each chunk sequence by sequence, so that a chunk of the whole batch is one stretch of rows.
//
// Ulysses (Jacobs et al. 2023): an all-to-all turns 1/U of the tokens and all heads into all tokens and 1/U of the
// heads, and attention is one device's. Hybrid: Ulysses inside groups of U ranks, the ring across the G = N/U groups.
//
// B batch, T tokens of a sequence, R = B*T/N rows of this rank, H query heads, K key/value heads, D head size
#include "01_single_gpu/io/data.h"
#include "01_single_gpu/layers.h"
#include "02_data_parallel/comm.h"

namespace train70b {

struct ContextLayout {
    int64_t ranks = 1;    // N
    int64_t ulysses = 1;  // U: ranks of a group that divide heads
    int64_t chunks = 1;   // 2: zigzag
    bool gather = false;  // all keys and values at once (gather_attention.h) in the place of the ring

    int64_t groups() const { return ranks / ulysses; }
    // The number of a group's chunk among all groups(), in the order of the sequence.
    int64_t chunk_number(int64_t group, int64_t chunk) const {
        return chunk == 0 ? group : chunks * groups() - 1 - group;
    }
    // The tokens of a rank, in the order of its rows. The loader and the tests share this. T: a multiple of
    // granularity().
    std::vector<TokenRange> tokens_of(int64_t rank, int64_t seq_len) const;
    int64_t granularity() const { return ranks * chunks; }
};

// ---- the ring: plain functions of tensors, as attention() of layers.h wants them ----------------------------------
struct RingShape {
    int64_t batch, chunk_len, chunks;  // rows = chunks * batch * chunk_len
    int64_t heads, kv_heads, head_dim;
};
// Causal attention of all tokens in the ring. ranks: one of each group. Sends 2 rows*K*D elements N-1 times.
OutLse ring_attention(const Comm& ranks, const RingShape& shape, const Tensor& q, const Tensor& k, const Tensor& v);
// Sends the same once more, and 2 rows*K*D elements of fp32 N times: the gradients' round ends where it began.
QKVGrads ring_attention_backward(const Comm& ranks, const RingShape& shape, const Tensor& dout, const Tensor& q,
                                 const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse);

// ---- Ulysses: (R, heads*D) of 1/U of the tokens <-> (R*U, heads/U*D) of all of the group's -------------------------
struct HeadsShape {
    int64_t batch, chunks, head_dim;
};
// heads: those of x; fewer than U are copied, each to U / heads ranks. Tape operations.
Var to_heads(Tape& tape, const Var& x, const Comm& ranks, const HeadsShape& shape);
Var to_sequence(Tape& tape, const Var& x, const Comm& ranks, const HeadsShape& shape);  // back; heads: at least U

}  // namespace train70b
