#include "06_context_parallel/context_parallel.h"

#include <algorithm>

#include "06_context_parallel/gather_attention.h"

namespace train70b {

const std::vector<ContextAlgorithm>& context_algorithms() {
    const auto one = [](int64_t, int64_t) { return int64_t(1); };
    const auto all = [](int64_t cp, int64_t) { return cp; };
    const auto hybrid = [](int64_t cp, int64_t size) { return size > 0 ? size : std::min<int64_t>(2, cp); };
    static const std::vector<ContextAlgorithm> list = {
        {"ring", "keys and values are passed around a ring", 1, false, false, one},
        {"zigzag", "the ring, with an early and a late chunk of the sequence on each rank", 2, false, false, one},
        {"ulysses", "all-to-alls: each rank has all tokens of some heads", 1, false, false, all},
        {"hybrid", "ulysses inside groups of ranks, the zigzag ring across them", 2, false, true, hybrid},
        {"gather", "all-gather of keys and values, zigzag chunks", 2, true, false, one}};
    return list;
}

void apply_context_parallel(Llama& model, const Comm& ranks, const ContextLayout& layout) {
    if (layout.ranks == 1) return;
    CHECK(ranks.size() == layout.ranks, "{} ranks", ranks.size());
    const int U = int(layout.ulysses);
    const Comm heads = ranks.split([U](int rank) { return rank / U; }, ranks.name() + "_ulysses");
    const Comm across =
        ranks.split([U](int rank) { return rank % U; }, ranks.name() + (layout.gather ? "_gather" : "_ring"));
    const int64_t head_dim = model.config.head_dim(), chunks = layout.chunks;
    for (Block& block : model.blocks)
        block.attention = [=](Tape& tape, const QKV& local, const Batch& batch) {
            const HeadsShape heads_shape{batch.sequences, chunks, head_dim};
            CHECK(local.q.data.cols() / head_dim % U == 0, "{} heads over {} ranks", local.q.data.cols() / head_dim, U);
            QKV x = local;
            if (U > 1)
                for (Var* each : {&x.q, &x.k, &x.v}) *each = to_heads(tape, *each, heads, heads_shape);
            const RingShape shape{.batch = batch.sequences,
                                  .chunk_len = batch.seq_len * U / chunks,
                                  .chunks = chunks,
                                  .heads = x.q.data.cols() / head_dim,
                                  .kv_heads = x.k.data.cols() / head_dim,
                                  .head_dim = head_dim};
            const DocumentStarts documents = batch.document_starts;
            const auto forward = layout.gather ? gather_attention : ring_attention;
            const auto backward = layout.gather ? gather_attention_backward : ring_attention_backward;
            Var out = attention(
                tape, x,
                [=](const Tensor& q, const Tensor& k, const Tensor& v) {
                    return forward(across, shape, documents, q, k, v);
                },
                [=](const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                    const Tensor& lse) { return backward(across, shape, documents, dout, q, k, v, o, lse); });
            return U > 1 ? to_sequence(tape, out, heads, heads_shape) : out;
        };
}

}  // namespace train70b
