#include "06_context_parallel/complete/ring_attention.h"

#include <cmath>

namespace train70b {

int64_t ContextLayout::chunk_index(int64_t group, int64_t chunk) const {
    // tag::lab-zigzag-chunk-index[]
    return chunk == 0 ? group : chunks * groups() - 1 - group;  // one early, one late
    // end::lab-zigzag-chunk-index[]
}

std::vector<TokenRange> ContextLayout::tokens_of(int64_t rank, int64_t seq_len) const {
    CHECK(seq_len % granularity() == 0, "{} tokens over {} ranks in {} chunks", seq_len, ranks, chunks);
    // tag::lab-zigzag-tokens[]
    const int64_t group = rank / ulysses, in_group = rank % ulysses;
    const int64_t chunk_len = seq_len / (groups() * chunks), count = chunk_len / ulysses;
    std::vector<TokenRange> list;
    for (int64_t chunk = 0; chunk < chunks; ++chunk)
        list.push_back({chunk_index(group, chunk) * chunk_len + in_group * count, count});
    return list;
    // end::lab-zigzag-tokens[]
}

std::vector<TokenRange> ContextLayout::queries_of(int64_t rank, int64_t seq_len) const {
    const ContextLayout across{.ranks = groups(), .chunks = chunks};
    return across.tokens_of(rank / ulysses, seq_len);
}

std::function<RankTokens(int64_t seq_len)> ContextLayout::of_rank(int64_t rank) const {
    return [layout = *this, rank](int64_t seq_len) {
        return RankTokens{layout.tokens_of(rank, seq_len), layout.queries_of(rank, seq_len)};
    };
}

// ---- the ring -------------------------------------------------------------------------------------------------------

Tensor pack(const Tensor& k, const Tensor& v) {
    Tensor kv({2 * k.rows(), k.cols()}, k.dtype(), k.device(), Memory::comm);
    Tensor first = kv.row_slice(0, k.rows()), second = kv.row_slice(k.rows(), 2 * k.rows());
    copy(first, k);
    copy(second, v);
    return kv;
}

namespace {

// An accumulator for sums of tensors like this one: stats_dtype (fp32).
Tensor zeros_for(const Tensor& like, const Shape& shape, Memory kind) {
    Tensor x(shape, stats_dtype(like.dtype()), like.device(), kind);
    fill(x, 0);
    return x;
}

AttentionShape block(const RingShape& s, bool causal, int64_t key_offset) {
    return {.batch = s.batch,
            .query_len = s.chunk_len,
            .key_len = s.chunk_len,
            .heads = s.heads,
            .kv_heads = s.kv_heads,
            .head_dim = s.head_dim,
            .causal = causal,
            .key_offset = key_offset};
}

// A chunk of this rank's queries and one of the source's keys.
struct ChunkPair {
    int64_t query, key;
    AttentionShape shape;      // causal: on the diagonal
    DocumentStarts documents;  // of the queries
};
// The pairs of chunks that neither causal attention nor documents mask entirely. step: of the ring.
std::vector<ChunkPair> visible_chunks(const Comm& ranks, const RingShape& s, const DocumentStarts& documents,
                                      int step) {
    const ContextLayout ring = s.layout(ranks.size());
    const int64_t rows = s.batch * s.chunk_len, source = (ranks.rank() - step + ranks.size()) % ranks.size();
    std::vector<ChunkPair> list;
    for (int64_t query = 0; query < s.chunks; ++query)
        for (int64_t key = 0; key < s.chunks; ++key) {
            const int64_t from = ring.chunk_index(ranks.rank(), query), to = ring.chunk_index(source, key);
            if (to > from) continue;
            const ChunkPair pair{query, key, block(s, to == from, to * s.chunk_len),
                                 documents.rows(query * rows, (query + 1) * rows)};
            if (visible_pairs(pair.shape, pair.documents) > 0) list.push_back(pair);
        }
    return list;
}

Tensor chunk_of(const Tensor& x, const RingShape& s, int64_t chunk) {
    const int64_t rows = s.batch * s.chunk_len;
    return x.row_slice(chunk * rows, (chunk + 1) * rows);
}

}  // namespace

OutLse ring_attention(const Comm& ranks, const RingShape& shape, const DocumentStarts& documents, const Tensor& q,
                      const Tensor& k, const Tensor& v) {
    const int64_t rows = q.rows();
    const int N = ranks.size();
    const DType stats = stats_dtype(q.dtype());
    OutLse result{Tensor::like(q), Tensor({rows, shape.heads}, stats, q.device())};
    if (N == 1 && shape.chunks == 1) {
        attention(result.out, result.lse, q, k, v, block(shape, true, 0), documents);
        return result;
    }
    Tensor sum = zeros_for(q, q.shape(), Memory::workspace);
    fill(result.lse, -INFINITY);
    // tag::ring[]
    const std::vector<int> steps = ring_steps(shape.layout(N), shape.chunk_len, shape.window);
    Tensor kv = pack(k, v), next_kv;
    for (size_t i = 0; i < steps.size(); ++i) {
        Work arriving;
        if (i + 1 < steps.size()) {
            next_kv = Tensor::like(kv, Memory::comm);
            arriving = ranks.ring_shift(kv, next_kv, steps[i + 1] - steps[i]);
        }
        const Tensor keys = kv.row_slice(0, rows), values = kv.row_slice(rows, 2 * rows);
        for (const ChunkPair& pair : visible_chunks(ranks, shape, documents, steps[i])) {
            const Tensor queries = chunk_of(q, shape, pair.query);
            Tensor out = Tensor::like(queries, Memory::workspace);
            Tensor lse({queries.rows(), shape.heads}, stats, q.device(), Memory::workspace);
            attention(out, lse, queries, chunk_of(keys, shape, pair.key), chunk_of(values, shape, pair.key), pair.shape,
                      pair.documents);
            Tensor sum_part = chunk_of(sum, shape, pair.query), lse_part = chunk_of(result.lse, shape, pair.query);
            merge_attention(sum_part, lse_part, out, lse);
        }
        arriving.wait();
        kv = next_kv;
    }
    // end::ring[]
    copy(result.out, sum);
    return result;
}

QKVGrads ring_attention_backward(const Comm& ranks, const RingShape& shape, const DocumentStarts& documents,
                                 const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                 const Tensor& out, const Tensor& lse) {
    const int64_t rows = q.rows();
    const int N = ranks.size();
    QKVGrads grads{Tensor::like(q), Tensor::like(k), Tensor::like(v)};
    if (N == 1 && shape.chunks == 1) {
        attention_backward(grads.dq, grads.dk, grads.dv, dout, q, k, v, out, lse, block(shape, true, 0), documents);
        return grads;
    }
    Tensor dq = zeros_for(q, q.shape(), Memory::workspace);
    const std::vector<int> steps = ring_steps(shape.layout(N), shape.chunk_len, shape.window);
    Tensor kv = pack(k, v), next_kv, sum_dkv, next_dkv;
    Work dkv_arriving;
    for (size_t i = 0; i < steps.size(); ++i) {
        const int next = i + 1 < steps.size() ? steps[i + 1] : N;  // the last one returns to the block's own rank
        Work arriving;
        if (next < N) {
            next_kv = Tensor::like(kv, Memory::comm);
            arriving = ranks.ring_shift(kv, next_kv, next - steps[i]);
        }
        const Tensor keys = kv.row_slice(0, rows), values = kv.row_slice(rows, 2 * rows);
        // This rank's contribution to the gradient of the block that it has now.
        Tensor dkv = zeros_for(q, kv.shape(), Memory::comm);
        const Tensor dkeys = dkv.row_slice(0, rows), dvalues = dkv.row_slice(rows, 2 * rows);
        for (const ChunkPair& pair : visible_chunks(ranks, shape, documents, steps[i])) {
            const auto of_query = [&](const Tensor& x) { return chunk_of(x, shape, pair.query); };
            const auto of_key = [&](const Tensor& x) { return chunk_of(x, shape, pair.key); };
            const auto add_to = [](Tensor to, const Tensor& part) { add(to, to, part); };
            Tensor dq_part(of_query(q).shape(), dq.dtype(), q.device(), Memory::workspace);
            Tensor dk_part(of_key(keys).shape(), dq.dtype(), q.device(), Memory::workspace);
            Tensor dv_part = Tensor::like(dk_part, Memory::workspace);
            attention_backward(dq_part, dk_part, dv_part, of_query(dout), of_query(q), of_key(keys), of_key(values),
                               of_query(out), of_query(lse), pair.shape, pair.documents);
            add_to(of_query(dq), dq_part);
            add_to(of_key(dkeys), dk_part);
            add_to(of_key(dvalues), dv_part);
        }
        // A block's gradient follows it one step behind: block b is on rank b + step, and the sum of the contributions
        // of the steps before arrives before this rank adds its own.
        dkv_arriving.wait();
        if (i > 0) add(dkv, dkv, next_dkv);
        sum_dkv = dkv;
        next_dkv = Tensor::like(sum_dkv, Memory::comm);
        dkv_arriving = ranks.ring_shift(sum_dkv, next_dkv, next - steps[i]);
        arriving.wait();
        kv = next_kv;
    }
    dkv_arriving.wait();
    copy(grads.dq, dq);
    copy(grads.dk, next_dkv.row_slice(0, rows));
    copy(grads.dv, next_dkv.row_slice(rows, 2 * rows));
    return grads;
}

// ---- Ulysses --------------------------------------------------------------------------------------------------------

namespace {

// (R_l, heads*D), all heads of this rank's tokens -> (R_l*U, heads/U*D), this rank's heads of all tokens of the group.
// 8 query heads, U = 4: by_head and outgoing are (4, R_l, 2 D), rank i gets heads 2i and 2i+1. 2 key/value heads:
// by_head is (2, R_l, D), outgoing (4, R_l, D), and ranks 0, 1 get head 0, ranks 2, 3 head 1: that of their query
// heads.
Tensor scatter_heads(const Comm& ranks, const HeadsShape& s, const Tensor& x) {
    const int64_t U = ranks.size(), rows = x.rows(), heads = x.cols() / s.head_dim,
                  copies = std::max<int64_t>(U / heads, 1);
    const int64_t width = std::max(heads / U, int64_t(1)) * s.head_dim;  // of one rank's heads
    Tensor by_head({heads / (width / s.head_dim), rows, width}, x.dtype(), x.device(), Memory::comm);
    swap_blocks(by_head, x, rows, by_head.shape()[0]);  // (rows, ranks, width) -> (ranks, rows, width)
    Tensor outgoing = by_head;
    if (copies > 1) {  // a key/value head for several ranks
        outgoing = Tensor({U, rows, width}, x.dtype(), x.device(), Memory::comm);
        for (int64_t rank = 0; rank < U; ++rank) {
            Tensor to = outgoing.row_slice(rank, rank + 1);
            copy(to, by_head.row_slice(rank / copies, rank / copies + 1));
        }
    }
    Tensor incoming = Tensor::like(outgoing, Memory::comm);
    ranks.all_to_all(incoming, outgoing).wait();
    // (U, chunks*B, tokens*width) -> (chunks*B, U, tokens*width): the group's tokens in the order of the sequence
    Tensor y({rows * U, width}, x.dtype(), x.device());
    swap_blocks(y, incoming, U, s.chunks * s.batch);
    return y;
}

// The inverse; copies of a head are summed.
Tensor gather_heads(const Comm& ranks, const HeadsShape& s, const Tensor& y, int64_t heads) {
    const int64_t U = ranks.size(), rows = y.rows() / U, width = y.cols(), copies = std::max<int64_t>(U / heads, 1);
    Tensor outgoing({U, rows, width}, y.dtype(), y.device(), Memory::comm);
    swap_blocks(outgoing, y, s.chunks * s.batch, U);
    Tensor by_head = Tensor::like(outgoing, Memory::comm);
    ranks.all_to_all(by_head, outgoing).wait();
    if (copies > 1) {
        Tensor sums({heads, rows, width}, stats_dtype(y.dtype()), y.device(), Memory::workspace);
        for (int64_t rank = 0; rank < U; ++rank) {
            Tensor sum = sums.row_slice(rank / copies, rank / copies + 1);
            const Tensor part = by_head.row_slice(rank, rank + 1);
            rank % copies == 0 ? copy(sum, part) : add(sum, sum, part);
        }
        by_head = Tensor(sums.shape(), y.dtype(), y.device(), Memory::comm);
        copy(by_head, sums);
    }
    Tensor x({rows, heads * s.head_dim}, y.dtype(), y.device());
    swap_blocks(x, by_head, by_head.shape()[0], rows);
    return x;
}

}  // namespace

Var to_heads(Tape& tape, const Var& x, const Comm& ranks, const HeadsShape& shape) {
    const int64_t heads = x.data.cols() / shape.head_dim;
    Var y{.data = scatter_heads(ranks, shape, x.data)};
    if (tape.recompute_attention)
        y.recomputed = Lazy<Tensor>([ranks, shape, x = Saved(x)] { return scatter_heads(ranks, shape, x.get()); });
    tape.record(
        [ranks, shape, heads, dx = x.grad, dy = y.grad] { accumulate(*dx, gather_heads(ranks, shape, *dy, heads)); });
    return y;
}

Var to_sequence(Tape& tape, const Var& x, const Comm& ranks, const HeadsShape& shape) {
    const int64_t heads = x.data.cols() / shape.head_dim * ranks.size();
    Var y{.data = gather_heads(ranks, shape, x.data, heads)};
    // Attention keeps its output by heads; o_proj needs it by tokens, and it is exchanged again.
    y.recomputed =
        Lazy<Tensor>([ranks, shape, heads, x = Saved(x)] { return gather_heads(ranks, shape, x.get(), heads); });
    tape.record([ranks, shape, dx = x.grad, dy = y.grad] { accumulate(*dx, scatter_heads(ranks, shape, *dy)); });
    return y;
}

}  // namespace train70b
