#include "06_context_parallel/complete/context_parallel.h"

#include "06_context_parallel/complete/gather_attention.h"

namespace train70b {

void apply_context_parallel(Llama& model, const Comm& ranks, const ContextLayout& layout) {
    if (layout.ranks == 1) return;
    CHECK(ranks.size() == layout.ranks, "{} ranks", ranks.size());
    const int U = int(layout.ulysses);
    const Comm heads = ranks.split([U](int rank) { return rank / U; }, ranks.name() + "_ulysses");
    const Comm across =
        ranks.split([U](int rank) { return rank % U; }, ranks.name() + (layout.gather ? "_gather" : "_ring"));
    const int64_t head_dim = model.config.head_dim(), chunks = layout.chunks;
    for (Block& block : model.blocks)
        block.attention = [=](Tape& tape, const QKV& local, const Batch& batch, AttentionMask mask) {
            const HeadsShape heads_shape{batch.sequences, chunks, head_dim};
            CHECK(local.q.data.cols() / head_dim % U == 0, "{} heads over {} ranks", local.q.data.cols() / head_dim, U);
            QKV x = local;
            if (U > 1)
                for (Var* head_tensor : {&x.q, &x.k, &x.v})
                    *head_tensor = to_heads(tape, *head_tensor, heads, heads_shape);
            const RingShape shape{.batch = batch.sequences,
                                  .chunk_len = batch.seq_len * U / chunks,
                                  .chunks = chunks,
                                  .heads = x.q.data.cols() / head_dim,
                                  .kv_heads = x.k.data.cols() / head_dim,
                                  .head_dim = head_dim,
                                  .window = mask.window};
            mask.first_head = heads.rank() * shape.heads;
            const DocumentStarts documents = mask.starts;
            const auto forward = layout.gather ? gather_attention : ring_attention;
            const auto backward = layout.gather ? gather_attention_backward : ring_attention_backward;
            Var out = attention(
                tape, x, mask,
                [=](const Tensor& q, const Tensor& k, const Tensor& v) {
                    return forward(across, shape, documents, q, k, v);
                },
                [=](const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                    const Tensor& lse) { return backward(across, shape, documents, dout, q, k, v, o, lse); });
            return U > 1 ? to_sequence(tape, out, heads, heads_shape) : out;
        };
}

}  // namespace train70b
