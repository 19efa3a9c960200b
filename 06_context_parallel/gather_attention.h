#pragma once
// All-gather attention (Dubey et al. 2024, The Llama 3 Herd of Models, section 3.3.2): every rank gathers all keys and
// values once, and attends with its own queries. One message forward in the place of the ring's N - 1, and nothing to
// merge; but nothing is computed while it is on its way, and for the time of one layer's attention a rank holds the
// keys and values of the whole sequence.
//
// Who holds what: zigzag's stretches g and 2N-1-g of 2N. What arrives lies rank by rank; put in the order of the
// sequence, the keys that a stretch of queries sees are those up to its own end: a slice of rows.
//
// Backward: keys and values are gathered again rather than kept (a layer would keep N times its own), each rank finds
// its queries' share of all gradients of keys and values, and one reduce-scatter, in fp32, sums them where they belong.
#include "06_context_parallel/ring_attention.h"

namespace train70b {

// Plain functions of tensors, as attention() of layers.h wants them; shape.chunks: as many as the layout's.
// Sends (N-1)/N of n elements, n = N * 2 rows*K*D: what the ring sends.
OutLse gather_attention(const Comm& ranks, const RingShape& shape, const Tensor& q, const Tensor& k, const Tensor& v);
// Sends the same once more, and (N-1)/N of n elements of fp32.
QKVGrads gather_attention_backward(const Comm& ranks, const RingShape& shape, const Tensor& dout, const Tensor& q,
                                   const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse);

// What a rank holds besides activations at the peak of the backward pass: as comm all keys and values and their
// gradients in fp32, n (a + 4) bytes; as workspace the keys and values of one sequence in order, and the gradients that
// one stretch of queries gives in fp32: its own, and those of the keys and values it sees. (And the reduce-scatter's
// own buffer, where it has one: n/N + 1 elements of fp32 in chapter 02's ring.)
struct GatherMemory {
    int64_t comm = 0, workspace = 0;  // bytes
};
GatherMemory gather_memory(const RingShape& shape, int64_t ranks, int64_t rank, DType dtype);

}  // namespace train70b
