#pragma once
// The cross-entropy of next-token prediction: loss = scale * sum over rows of (log sum_v e^logits - logits[target]),
// and the z-loss beside it: z * scale * sum over rows of lse^2 (Chowdhery et al. 2022, section 5), which keeps the
// logits from drifting: softmax does not notice if all of a row grow alike, but bf16 does.
// It comes in steps, so that ranks which split the vocabulary can reduce between them (chapter 04).
//
// logits (R, V_l): this rank's part of the vocabulary, from first_vocab on; targets (R) i32: token ids of the whole
// vocabulary. Columns of tokens >= vocab are padding: they take no part in the softmax and get no gradient.
//
// A row whose target is kIgnored adds nothing to the loss, and its gradient is exactly 0. Its logits are never read, so
// that a NaN among them reaches neither.
// row_max, row_sum, target_logit, lse (R) have the stats_dtype of logits. logit_scale: logits are multiplied by it as
// they are read (muP), so "logits" stands for the products in all formulas.
#include "01_single_gpu/core/tensor.h"

namespace train70b {

constexpr int32_t kIgnored = -1;

// 1. row_max = max_v logits,  row_sum = sum_v e^(logits - row_max),
//    target_logit = logits[target - first_vocab], 0 where the target is not in this part
//    An ignored row: 0, 1, 0 in the part that begins the vocabulary, 0, 0, 0 in the others; so its lse and loss are 0.
void softmax_stats(Tensor& row_max, Tensor& row_sum, Tensor& target_logit, const Tensor& logits, const Tensor& targets,
                   int64_t first_vocab = 0, int64_t vocab = INT64_MAX, double logit_scale = 1);

// 2. Only with a split vocabulary: row_sum *= e^(row_max - whole_max), so that the parts' sums can be added. whole_max
//    (R): the maximum over all parts.
void rescale_sums(Tensor& row_sum, const Tensor& row_max, const Tensor& whole_max);

// 3. lse = row_max + log(row_sum),  loss[0] = scale * sum over rows of (lse - target_logit), summed in double
//    loss has one element, or two: loss[1] = z_loss * scale * sum over rows of lse^2
void cross_entropy(Tensor& loss, Tensor& lse, const Tensor& row_max, const Tensor& row_sum, const Tensor& target_logit,
                   double scale, double z_loss = 0);

// The gradient of loss[0] + loss[1] with respect to the logits as they are stored, in place: the logits and their
// gradient share one buffer.
//    logits <- (softmax(logits) * (1 + 2 z_loss lse) - onehot(target)) * scale * logit_scale
void cross_entropy_backward(Tensor& logits, const Tensor& targets, const Tensor& lse, double scale,
                            int64_t first_vocab = 0, int64_t vocab = INT64_MAX, double logit_scale = 1,
                            double z_loss = 0);

}  // namespace train70b
