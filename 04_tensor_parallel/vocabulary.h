#pragma once
// Cross-entropy over a vocabulary that lies in parts on several ranks (Shoeybi et al. 2019, section 3, at its end).
//
// The logits (R, V) are the largest tensor of a small model and are never gathered. A row's loss is
//     log sum_v exp(x_v - m) + m - x_target,      m = max_v x_v
// and each of its three parts is a reduction, so N ranks exchange three numbers per row instead of V:
//     m = max over ranks,    the sum = sum over ranks of (sum of the part) * exp(m_part - m),    x_target = from its owner
#include "01_single_gpu/layers.h"
#include "02_data_parallel/comm.h"

namespace train70b {

// logits (R, V_l): of the tokens from first_vocab on; those >= vocab are padding and never win. The loss (1), the same
// on all ranks. As next_token_loss, it starts its own gradient, in the place of the logits.
Var vocabulary_parallel_loss(Tape& tape, const Var& logits, const Batch& batch, const Comm& ranks, int64_t first_vocab,
                             int64_t vocab);

}  // namespace train70b
