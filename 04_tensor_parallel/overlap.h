#pragma once
// Tensor parallelism whose communication hides behind its products ("async TP"; Wang et al. 2023): f and g move into
// the products, which are computed in N chunks of rows while the other chunks travel round the ring.
//
//   all-gather, then product                              product, then reduce-scatter
//     step k: multiply chunk r - k, which has come;         step k: multiply chunk r - 1 - k, add what has come from the
//             pass it on, and receive the next one                  left, and pass the sum on; the last chunk is r's own
//
//     rank 1 of 4   compute   | X1 W | X0 W | X3 W | X2 W |
//                   ring      |  X0  |  X3  |  X2  |
//
// Backward, the collective of the input's gradient starts before the product of the weight's gradient and ends after
// it. The same sums as without overlap; on a CPU nothing overlaps, and order and bytes are what there is to see.
#include "01_single_gpu/layers.h"
#include "02_data_parallel/comm.h"

namespace train70b {

// op(X) op(W) for X = all ranks' rows, (R/N, in) -> (R, out), chunk by chunk. gathered: (R, in), comm.
Tensor all_gather_matmul(const Comm& ranks, const Tensor& part, const Tensor& weight, Transpose transpose,
                         Tensor& gathered);
// This rank's rows of the sum over ranks of x W^T, (R, in) -> (R/N, out).
Tensor matmul_reduce_scatter(const Comm& ranks, const Tensor& x, const Tensor& weight);

// f and the product behind it, y = f(x) W^T;  sequence: x (R/N, in), else (R, in);  y (R, out_l).
Var column_parallel_linear(Tape& tape, const Var& x, Linear& linear, const Comm& ranks, bool sequence);
// The product and g behind it, with sequence parallelism: x (R, in_l) -> (R/N, out).
Var row_parallel_linear(Tape& tape, const Var& x, Linear& linear, const Comm& ranks);

}  // namespace train70b
