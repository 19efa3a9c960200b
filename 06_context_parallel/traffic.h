#pragma once
// What a rank computes and sends under context parallelism, by formula: the tests hold the programs to it.
#include "06_context_parallel/context_parallel.h"

namespace train70b {

// Pairs (query, key) of one sequence that a rank computes for its heads' share: of all N ranks together T (T+1) / 2.
//   ring     c (c+1)/2 + r c^2,  c = T/N: the last rank of 8 has 15 times the work of the first
//   zigzag   c (c+1) + c^2 + 2 (N-1) c^2,  c = T/2N, on every rank; gather the same
//   ulysses  T (T+1) / 2 for 1/N of the heads
double attention_pairs(const ContextLayout& layout, int64_t rank, int64_t seq_len);  // times heads / U
// The same with documents (documents.h), counted: no layout divides them evenly.
double attention_pairs(const ContextLayout& layout, int64_t rank, const std::vector<int32_t>& document_starts);
// Bytes that a rank sends for one block and micro-batch, forward and backward: in the ring, inside Ulysses' groups, and
// in collectives of keys and values.
//   ring      (G-1) 2 n forward, the same backward, and G 2 n of fp32: n = rows K D of what a group holds, of its heads
//   ulysses   (U-1)/U of q, k, v and out, rows (2 H + 2 max(K, U)) D, once each way, and of out once more for the
//             gradient of o_proj's weights
//   gather    (N-1)/N of 2 N n forward, the same backward, and of as many elements of fp32
// recompute: selective and full run the forward part once more; of selective the last exchange is then a part.
// pointwise keeps what attention made, and sends no more than none.
struct ContextTraffic {
    int64_t ring = 0, ulysses = 0, gather = 0;
    bool operator==(const ContextTraffic&) const = default;
};
ContextTraffic context_traffic(const LlamaConfig& config, const ContextLayout& layout, int64_t batch, int64_t seq_len,
                               DType dtype, Recompute recompute);

}  // namespace train70b
