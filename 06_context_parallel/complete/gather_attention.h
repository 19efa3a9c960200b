#pragma once
// All-gather attention (Grattafiori et al. 2024, Llama 3, section 3.3.2): every rank gathers all keys
// and values once, and attends with its own queries. One message forward instead of the ring's N - 1, and nothing to
// merge; but the message is not overlapped with computation, and during one layer's attention a rank holds the keys and
// values of the full sequence.
//
// A rank holds zigzag's chunks g and 2N-1-g of 2N. The gathered rows are ordered by rank; reordered by position in the
// sequence, the keys that are visible to a chunk of queries are those up to the chunk's end: a slice of rows.
//
// Backward: keys and values are gathered again rather than kept (a layer would keep N times its own). Each rank
// computes its queries' contribution to the gradients of all keys and values, and one reduce-scatter in fp32 sums them.
#include "06_context_parallel/complete/ring_attention.h"

namespace train70b {

// Plain functions of tensors, as attention() of layers.h takes them; shape.chunks: those of the layout.
// Sends (N-1)/N of n elements, n = N * 2 R_l*K*D: as many as the ring.
OutLse gather_attention(const Comm& ranks, const RingShape& shape, const DocumentStarts& documents, const Tensor& q,
                        const Tensor& k, const Tensor& v);
// Sends the same once more, and (N-1)/N of n elements of fp32.
QKVGrads gather_attention_backward(const Comm& ranks, const RingShape& shape, const DocumentStarts& documents,
                                   const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                   const Tensor& out, const Tensor& lse);

// What a rank holds besides activations at the peak of the backward pass, elements of a bytes: as comm all keys and
// values and their gradients in fp32, n (a + 4) bytes; as workspace the keys and values of one sequence in order, and
// the fp32 gradients from one chunk of queries: its own, and those of the keys and values visible to it. (And the
// reduce-scatter's own buffer, if it has one: n/N + 1 elements of fp32 in chapter 02's ring.)
struct GatherMemory {
    int64_t comm = 0, workspace = 0;  // bytes
};
GatherMemory gather_memory(const RingShape& shape, int64_t ranks, int64_t rank, DType dtype);

}  // namespace train70b
