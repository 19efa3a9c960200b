#pragma once
// Ring attention (Liu et al. 2023): every rank has some tokens of each sequence. Its queries stay; the keys and values
// of all ranks travel round a ring, and after N - 1 transfers every query has met every key that it may see.
//
// Causal attention has work below the diagonal only. With the tokens in order, rank 0 has next to none and the last
// rank nearly twice the mean; "zigzag" cuts a sequence into 2N chunks, of which rank r has r and 2N-1-r, an early and a
// late one. Then every rank has the work of two pairs of chunks at every step (at step 0: one, and two halves):
//
//   N = 4, by chunks:   0  1  2  3  4  5  6  7
//            of rank:   0  1  2  3  3  2  1  0
#include <cmath>

#include "01_single_gpu/minimal.h"
#include "02_data_parallel/comm.h"

namespace train70b::minimal {

struct RingAttention : OneDevice {
    Comm ranks;
    int64_t chunks;  // of a sequence on a rank: 1 in order, 2 zigzag

    RingAttention(const Comm& all, int64_t chunks_per_rank) : ranks(all), chunks(chunks_per_rank) {}

    int64_t chunk_number(int64_t rank, int64_t chunk) const {  // in the sequence
        return chunk == 0 ? rank : 2 * ranks.size() - 1 - rank;
    }
    Ranges tokens(int64_t T) const {  // of this rank: (begin, count) of each chunk
        const int64_t length = T / (ranks.size() * chunks);
        Ranges ranges;
        for (int64_t i = 0; i < chunks; ++i) ranges.push_back({chunk_number(ranks.rank(), i) * length, length});
        return ranges;
    }

    // Calls body(shape, i, j) for chunk i of this rank's queries and chunk j of the keys of rank `owner`, unless j is
    // later in the sequence: a query sees all keys of an earlier chunk and, in its own chunk, those up to itself.
    void for_visible(const AttentionShape& all, int64_t owner, auto&& body) const {
        for (int64_t i = 0; i < chunks; ++i)
            for (int64_t j = 0; j < chunks; ++j) {
                const int64_t query = chunk_number(ranks.rank(), i), key = chunk_number(owner, j);
                AttentionShape shape = all;
                shape.query_len = shape.key_len = all.query_len / chunks;
                shape.causal = key == query;
                if (key <= query) body(shape, i, j);
            }
    }
    int64_t source(int64_t step) const { return (ranks.rank() - step + ranks.size()) % ranks.size(); }
    Tensor part(const Tensor& x, int64_t i, int64_t parts) const {  // part i of x's rows
        return x.row_slice(i * x.rows() / parts, (i + 1) * x.rows() / parts);
    }
    Tensor chunk(const Tensor& x, int64_t i) const { return part(x, i, chunks); }

    // A softmax over some of the keys and its lse are enough to merge it with one over other keys:
    //   l = log(e^lse1 + e^lse2),  out = out1 e^(lse1 - l) + out2 e^(lse2 - l)
    void attend(Heads& h, const AttentionShape& shape) {
        Tensor out = zeros(h.out.shape(), h), kv = zeros({2 * h.k.rows(), h.k.cols()}, h), next;
        fill(h.lse, -INFINITY);
        Tensor own_k = part(kv, 0, 2), own_v = part(kv, 1, 2);
        copy(own_k, h.k), copy(own_v, h.v);  // one buffer, one message
        // tag::ring[]
        for (int64_t step = 0; step < ranks.size(); ++step) {
            Work arriving;
            if (step + 1 < ranks.size()) {
                next = Tensor::like(kv, Memory::comm);
                arriving = ranks.ring_shift(kv, next);  // to the next rank, while this one computes
            }
            const Tensor k = part(kv, 0, 2), v = part(kv, 1, 2);
            for_visible(shape, source(step), [&](const AttentionShape& visible, int64_t i, int64_t j) {
                Tensor some = Tensor::like(chunk(h.q, i)), some_lse = Tensor::like(chunk(h.lse, i));
                attention(some, some_lse, chunk(h.q, i), chunk(k, j), chunk(v, j), visible);
                Tensor all = chunk(out, i), all_lse = chunk(h.lse, i);
                merge_attention(all, all_lse, some, some_lse);
            });
            arriving.wait();
            kv = next;
        }
        // end::ring[]
        copy(h.out, out);
    }

    // P = e^(S - lse) and dS = P (dP - sum(dout * out)) need out and lse over all keys, which are known by now: so each
    // block's part of the gradients can be computed alone. dk and dv travel with their k and v, and one more transfer
    // brings them home. kv's transfers overlap the computation, dkv's do not (in ring_attention.cpp they do).
    void attend_backward(Heads& dh, const Tensor& dout, const Heads& h, const AttentionShape& shape) {
        Tensor kv = zeros({2 * h.k.rows(), h.k.cols()}, h), dkv = zeros(kv.shape(), h);
        Tensor own_k = part(kv, 0, 2), own_v = part(kv, 1, 2);
        copy(own_k, h.k), copy(own_v, h.v);
        fill(dh.q, 0);
        for (int64_t step = 0; step < ranks.size(); ++step) {
            const Tensor next = Tensor::like(kv, Memory::comm), dnext = Tensor::like(dkv, Memory::comm);
            Work arriving;
            if (step + 1 < ranks.size()) arriving = ranks.ring_shift(kv, next);
            const Tensor k = part(kv, 0, 2), v = part(kv, 1, 2), dk = part(dkv, 0, 2), dv = part(dkv, 1, 2);
            for_visible(shape, source(step), [&](const AttentionShape& visible, int64_t i, int64_t j) {
                Heads d = {Tensor::like(chunk(h.q, i)), Tensor::like(chunk(k, j)), Tensor::like(chunk(v, j)), {}, {}};
                attention_backward(d.q, d.k, d.v, chunk(dout, i), chunk(h.q, i), chunk(k, j), chunk(v, j),
                                   chunk(h.out, i), chunk(h.lse, i), visible);
                for (auto [to, from] : {std::pair(chunk(dh.q, i), d.q), {chunk(dk, j), d.k}, {chunk(dv, j), d.v}})
                    add(to, to, from);
            });
            arriving.wait();
            ranks.ring_shift(dkv, dnext).wait();
            kv = next, dkv = dnext;
        }
        copy(dh.k, part(dkv, 0, 2)), copy(dh.v, part(dkv, 1, 2));
    }

  private:
    static Tensor zeros(const Shape& shape, const Heads& like) {  // fp32; in bf16 training kv would be bf16
        Tensor x(shape, stats_dtype(like.q.dtype()), like.q.device(), Memory::comm);
        fill(x, 0);
        return x;
    }
};

}  // namespace train70b::minimal
