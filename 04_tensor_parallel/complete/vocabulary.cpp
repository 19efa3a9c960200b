#include "04_tensor_parallel/complete/vocabulary.h"

namespace train70b {

Var vocabulary_parallel_loss(Tape& tape, const Var& logits, const Batch& batch, const Comm& ranks, int64_t first_vocab,
                             int64_t vocab, const LossOptions& o) {
    // tag::lab-vocabulary-loss[]
    const int64_t R = logits.data.rows();
    const Device device = logits.data.device();
    const DType stats = stats_dtype(logits.data.dtype());
    Tensor global_max({R}, stats, device), sums({2, R}, stats, device), lse({R}, stats, device);
    Tensor row_sum = sums.element_slice(0, {R}), target_logit = sums.element_slice(R, {R});
    {
        Tensor row_max({R}, stats, device);
        softmax_stats(row_max, row_sum, target_logit, logits.data, batch.targets, first_vocab, vocab, o.logit_scale);
        copy(global_max, row_max);
        ranks.all_reduce(global_max, Reduce::max).wait();
        rescale_sums(row_sum, row_max, global_max);
    }
    ranks.all_reduce(sums).wait();  // one message; the target's logit is 0 on all ranks except its owner
    Var loss{.data = Tensor({o.numbers()}, stats, device)};
    cross_entropy(loss.data, lse, global_max, row_sum, target_logit, batch.loss_scale, o.z_loss);
    if (tape.recording) {
        Tensor dlogits = logits.data;
        cross_entropy_backward(dlogits, batch.targets, lse, batch.loss_scale, first_vocab, vocab, o.logit_scale,
                               o.z_loss);
        tape.record([dlogits, grad = logits.grad] { *grad = dlogits; });
    }
    return loss;
    // end::lab-vocabulary-loss[]
}

}  // namespace train70b
