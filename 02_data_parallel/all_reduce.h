#pragma once
// All-reduce by hand, over nothing but sends and receives: x on every rank becomes the sum of all ranks' x.
//
// N ranks, n bytes of x. A message of m bytes takes a + m b: a, the latency; b, seconds per byte.
//                                                     time                          bytes that a rank sends
//   naive      everyone to rank 0, and back           2 (N-1) (a + n b)             rank 0: n (N-1), the others n
//   ring       reduce-scatter, then all-gather        2 (N-1) a + 2 n b (N-1)/N     2 n (N-1)/N: the least there is
//   pipelined  the ring in pieces: while one piece is added, the next is on its way; the same bytes
//   halving    recursive halving, then doubling       2 log2(N) a + 2 n b (N-1)/N   2 n (N-1)/N for N = 2^k
//
// Every element is summed at one place and copied from there, so all ranks end with the same bits. The order of the sum
// depends on the algorithm, on N and on where the element lies, never on timing: a run repeats, two layouts differ in
// the last bits. bf16: each hop adds in fp32 and rounds its result, so N-1 roundings on a ring, log2(N) when halving.
//
// Any number of elements, fewer than ranks too; in place; CPU and CUDA tensors in fp32 and bf16.
#include "02_data_parallel/comm.h"

namespace train70b {

void naive_all_reduce(Transport& peers, const Tensor& x);
void ring_all_reduce(Transport& peers, const Tensor& x);
// piece_bytes: of a message at least, where there is so much
void pipelined_ring_all_reduce(Transport& peers, const Tensor& x, int64_t piece_bytes = 512 << 10);
void halving_doubling_all_reduce(Transport& peers, const Tensor& x);
void all_reduce_by_hand(AllReduce algorithm, Transport& peers, const Tensor& x);

// The ring's two halves. Segment i of n elements is [n i / N, n (i+1) / N). Afterwards segment rank() of x holds the
// sum (the rest: parts of sums); and, given that, all of x does.
void ring_reduce_scatter(Transport& peers, const Tensor& x);
void ring_all_gather(Transport& peers, const Tensor& x);

}  // namespace train70b
