#pragma once
// Cross-entropy over a vocabulary that is sharded over ranks (Shoeybi et al. 2019, end of section 3).
//
// The logits (R, V) are the largest tensor of a small model and are never gathered. A row's loss is
//     log sum_v exp(x_v - m) + m - x_target,      m = max_v x_v
// and each of its three terms is a reduction, so N ranks exchange three numbers per row instead of V. With m_l and
// sum_l of the rank's own logits:
//     m = max over ranks of m_l,    sum = sum over ranks of sum_l * exp(m_l - m),    x_target: 0 except on its owner
#include "01_single_gpu/complete/layers.h"
#include "02_data_parallel/comm.h"

namespace train70b {

// logits (R, V_l): of the tokens from first_vocab on; those >= vocab are padding and do not count. Returns the loss
// as next_token_loss does, the same on all ranks; it starts its own gradient, which overwrites the logits. A z-loss
// sends nothing more: lse is of the whole row on every rank.
Var vocabulary_parallel_loss(Tape& tape, const Var& logits, const Batch& batch, const Comm& ranks, int64_t first_vocab,
                             int64_t vocab, const LossOptions& options = {});

}  // namespace train70b
