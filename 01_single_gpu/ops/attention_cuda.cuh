#pragma once
// What the plain and the tensor-core attention share.
#include "01_single_gpu/core/cuda.cuh"
#include "01_single_gpu/ops/attention.h"

namespace train70b::cuda {

// Query i sees the keys before visible_keys(i), from its document's first one on.
__device__ inline int64_t visible_keys(const AttentionShape& s, int64_t query) {
    const int64_t limit = query + 1 + s.key_len - s.query_len;
    return s.causal ? max(int64_t(0), min(limit, s.key_len)) : s.key_len;
}

// The first query that sees this key, if any does.
__device__ inline int64_t first_query(const AttentionShape& s, int64_t key) {
    return s.causal ? max(int64_t(0), key - (s.key_len - s.query_len)) : int64_t(0);
}

// Documents: `Documents` is a type parameter of the kernels, so that without documents nothing of them is left.
struct OneDocument {
    static constexpr bool kPacked = false;
    __device__ int64_t first_key(const AttentionShape&, int64_t, int64_t) const { return 0; }
    __device__ int64_t end_query(const AttentionShape& s, int64_t, int64_t) const { return s.query_len; }
};
struct PackedDocuments {
    static constexpr bool kPacked = true;
    const int32_t* starts;  // of all queries (DocumentStarts)

    // The first key that a query of the sequence whose queries begin at q_row may see: in [0, key_len].
    __device__ int64_t first_key(const AttentionShape& s, int64_t q_row, int64_t query) const {
        const int64_t row = q_row + min(query, s.query_len - 1);
        return max(int64_t(0), min(starts[row] - s.key_offset, s.key_len));
    }
    // Behind the last query that may see this key, by bisection: the starts ascend.
    __device__ int64_t end_query(const AttentionShape& s, int64_t q_row, int64_t key) const {
        int64_t begin = 0, end = s.query_len;
        while (begin < end) {
            const int64_t middle = (begin + end) / 2;
            if (first_key(s, q_row, middle) <= key)
                begin = middle + 1;
            else
                end = middle;
        }
        return begin;
    }
};

template <class Body>
void with_documents(const DocumentStarts& documents, Body&& body) {
    if (documents)
        body(PackedDocuments{documents.on_device.data<int32_t>()});
    else
        body(OneDocument());
}

// What a block of a grid (tiles, heads, batch) works on: a sequence's rows of queries and keys, [row, end), which are E
// and K columns wide, and a query head with its key/value head.
struct BlockWork {
    int64_t head, kv_head, E, K, q_row, q_end, k_row, k_end;
};
__device__ inline BlockWork block_work(const AttentionShape& s, int64_t head) {
    const int64_t kv_head = head / (s.heads / s.kv_heads), E = s.heads * s.head_dim, K = s.kv_heads * s.head_dim;
    const int64_t q_row = blockIdx.z * s.query_len, k_row = blockIdx.z * s.key_len;
    return {head, kv_head, E, K, q_row, q_row + s.query_len, k_row, k_row + s.key_len};
}

// attention_mma.cu: bf16 on tensor cores, head sizes 64 and 128.
bool mma_can(DType dtype, const AttentionShape& shape);
decltype(train70b::attention) mma_attention;
void mma_attention_backward(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q, const Tensor& k,
                            const Tensor& v, const Tensor& lse, const Tensor& delta, const AttentionShape& shape,
                            const DocumentStarts& documents);

}  // namespace train70b::cuda
