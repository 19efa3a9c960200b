#include "06_context_parallel/complete/gather_attention.h"

namespace train70b {

namespace {

// Tokens from the beginning of the sequence to the end of a rank's last chunk: those visible to its queries.
int64_t visible_tokens(const RingShape& s, int64_t ranks, int64_t rank) {
    return (s.layout(ranks).chunk_index(rank, s.chunks - 1) + 1) * s.chunk_len;
}

// The rows of one chunk of one sequence in the keys and values of all ranks, or in their gradients: (N * 2 R_l, K*D),
// ordered by rank, then keys before values, then by chunk, then by sequence.
struct Keys {
    Tensor k, v;
};
Keys chunk_rows(const Tensor& all, const RingShape& s, int64_t rank, int64_t chunk, int64_t sequence) {
    const int64_t first = ((2 * rank * s.chunks + chunk) * s.batch + sequence) * s.chunk_len;
    const int64_t second = first + s.chunks * s.batch * s.chunk_len;
    return {all.row_slice(first, first + s.chunk_len), all.row_slice(second, second + s.chunk_len)};
}

Tensor gathered(const Comm& ranks, const Tensor& k, const Tensor& v) {
    const Tensor own = pack(k, v);
    Tensor all({ranks.size() * own.rows(), k.cols()}, k.dtype(), k.device(), Memory::comm);
    ranks.all_gather(all, own).wait();
    return all;
}

// Keys and values of one sequence in order, up to those visible to this rank's last query: (tokens, K*D).
Keys in_order(const Comm& ranks, const RingShape& s, const Tensor& all, int64_t sequence) {
    const int64_t seen = visible_tokens(s, ranks.size(), ranks.rank());
    const Shape shape = {seen, all.cols()};
    Keys keys{Tensor(shape, all.dtype(), all.device(), Memory::workspace),
              Tensor(shape, all.dtype(), all.device(), Memory::workspace)};
    for (int64_t rank = 0; rank < ranks.size(); ++rank)
        for (int64_t chunk = 0; chunk < s.chunks; ++chunk) {
            const int64_t begin = s.layout(ranks.size()).chunk_index(rank, chunk) * s.chunk_len;
            if (begin >= seen) continue;
            Tensor k = keys.k.row_slice(begin, begin + s.chunk_len), v = keys.v.row_slice(begin, begin + s.chunk_len);
            const Keys from = chunk_rows(all, s, rank, chunk, sequence);
            copy(k, from.k);
            copy(v, from.v);
        }
    return keys;
}

// This rank's queries of one chunk of one sequence.
struct Queries {
    int64_t begin, seen;  // first of the rank's rows; number of visible keys, from the beginning of the sequence
    AttentionShape shape;
    DocumentStarts documents;

    Queries(const Comm& ranks, const RingShape& s, const DocumentStarts& all, int64_t chunk, int64_t sequence)
        : begin((chunk * s.batch + sequence) * s.chunk_len),
          seen((s.layout(ranks.size()).chunk_index(ranks.rank(), chunk) + 1) * s.chunk_len),
          shape{.batch = 1,
                .query_len = s.chunk_len,
                .key_len = seen,
                .heads = s.heads,
                .kv_heads = s.kv_heads,
                .head_dim = s.head_dim},
          documents(all.rows(begin, begin + s.chunk_len)) {}
    Tensor of(const Tensor& x) const { return x.row_slice(begin, begin + shape.query_len); }
    Tensor visible(const Tensor& keys) const { return keys.row_slice(0, seen); }
};

}  // namespace

OutLse gather_attention(const Comm& ranks, const RingShape& s, const DocumentStarts& documents, const Tensor& q,
                        const Tensor& k, const Tensor& v) {
    OutLse result{Tensor::like(q), Tensor({q.rows(), s.heads}, stats_dtype(q.dtype()), q.device())};
    const Tensor all = gathered(ranks, k, v);
    for (int64_t sequence = 0; sequence < s.batch; ++sequence) {
        const Keys keys = in_order(ranks, s, all, sequence);
        for (int64_t chunk = 0; chunk < s.chunks; ++chunk) {
            const Queries queries(ranks, s, documents, chunk, sequence);
            Tensor out = queries.of(result.out), lse = queries.of(result.lse);
            attention(out, lse, queries.of(q), queries.visible(keys.k), queries.visible(keys.v), queries.shape,
                      queries.documents);
        }
    }
    return result;
}

QKVGrads gather_attention_backward(const Comm& ranks, const RingShape& s, const DocumentStarts& documents,
                                   const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                   const Tensor& out, const Tensor& lse) {
    QKVGrads grads{Tensor::like(q), Tensor::like(k), Tensor::like(v)};
    Tensor all = gathered(ranks, k, v);
    // This rank's contribution to the gradients of all keys and values, in the order of `all`.
    Tensor dkv(all.shape(), stats_dtype(q.dtype()), q.device(), Memory::comm);
    fill(dkv, 0);
    for (int64_t sequence = 0; sequence < s.batch; ++sequence) {
        const Keys keys = in_order(ranks, s, all, sequence);
        for (int64_t chunk = 0; chunk < s.chunks; ++chunk) {
            const Queries queries(ranks, s, documents, chunk, sequence);
            const Tensor seen_k = queries.visible(keys.k), seen_v = queries.visible(keys.v);
            Tensor dq(queries.of(q).shape(), dkv.dtype(), q.device(), Memory::workspace);
            Tensor dk(seen_k.shape(), dkv.dtype(), q.device(), Memory::workspace);
            Tensor dv = Tensor::like(dk, Memory::workspace);
            attention_backward(dq, dk, dv, queries.of(dout), queries.of(q), seen_k, seen_v, queries.of(out),
                               queries.of(lse), queries.shape, queries.documents);
            Tensor dq_rows = queries.of(grads.dq);
            copy(dq_rows, dq);
            for (int64_t rank = 0; rank < ranks.size(); ++rank)
                for (int64_t key_chunk = 0; key_chunk < s.chunks; ++key_chunk) {
                    const int64_t begin = s.layout(ranks.size()).chunk_index(rank, key_chunk) * s.chunk_len;
                    if (begin >= queries.seen) continue;
                    Keys sum = chunk_rows(dkv, s, rank, key_chunk, sequence);
                    add(sum.k, sum.k, dk.row_slice(begin, begin + s.chunk_len));
                    add(sum.v, sum.v, dv.row_slice(begin, begin + s.chunk_len));
                }
        }
    }
    all = Tensor();
    Tensor own({2 * k.rows(), k.cols()}, dkv.dtype(), q.device(), Memory::comm);
    ranks.reduce_scatter(own, dkv).wait();
    copy(grads.dk, own.row_slice(0, k.rows()));
    copy(grads.dv, own.row_slice(k.rows(), 2 * k.rows()));
    return grads;
}

GatherMemory gather_memory(const RingShape& s, int64_t ranks, int64_t rank, DType dtype) {
    const int64_t width = s.kv_heads * s.head_dim, tokens = ranks * s.chunks * s.chunk_len, a = size_of(dtype);
    const int64_t seen = visible_tokens(s, ranks, rank), stats = size_of(stats_dtype(dtype));
    return {.comm = 2 * s.batch * tokens * width * (a + stats),
            .workspace = 2 * seen * width * (a + stats) + s.chunk_len * s.heads * s.head_dim * stats};
}

}  // namespace train70b
