#pragma once
// Tensor parallelism with overlapped communication ("async TP"; Wang et al. 2023): f and g are part of the products,
// which are computed in N chunks of rows while the other chunks are passed around a ring.
//
//   all-gather, then matmul                               matmul, then reduce-scatter
//     step k: multiply chunk r - k, while it is sent        step k: multiply chunk r - 1 - k, add the sum received from
//             on and the next one is received                       the left, and send it on; the last chunk is r's own
//
//     rank 1 of 4   compute   | X1 W | X0 W | X3 W | X2 W |
//                   ring      |  X0  |  X3  |  X2  |
//
// A loop that waits for the shift and the product of each step takes the sum of the longer ones, sum_k max(product k,
// shift k). On streams (nccl) only data and memory are waited for, so a step in which the ring is slow can be made up
// for: about max(sum_k product k, sum_k shift k). There a product waits for the shift that brings its rows, and no
// shift for a product; partial sums are added on a side stream, and the products may be two of them ahead of the ring.
//
// In the backward pass the collective of the input gradient overlaps the product of the weight gradient. The sums are
// those without overlap. On a CPU nothing overlaps; only the order of operations and the bytes can be observed there.
#include "01_single_gpu/complete/layers.h"
#include "02_data_parallel/comm.h"

namespace train70b {

// X op(W) for X = all ranks' rows, (R/N, in) -> (R, out), chunk by chunk. gathered: X (R, in), comm.
Tensor all_gather_matmul(const Comm& ranks, const Tensor& shard, const Tensor& weight, Transpose transpose,
                         Tensor& gathered);
// This rank's rows of the sum over ranks of x W^T, (R, in) -> (R/N, out).
Tensor matmul_reduce_scatter(const Comm& ranks, const Tensor& x, const Tensor& weight);

// f and the product after it, y = f(x) W^T;  sequence: x (R/N, in), else (R, in);  y (R, out_l).
Var column_parallel_linear(Tape& tape, const Var& x, Linear& linear, const Comm& ranks, bool sequence);
// The product and g after it, with sequence parallelism: x (R, in_l) -> (R/N, out).
Var row_parallel_linear(Tape& tape, const Var& x, Linear& linear, const Comm& ranks);

}  // namespace train70b
