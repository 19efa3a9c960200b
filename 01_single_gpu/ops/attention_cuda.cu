// Attention on a GPU, the plain version: fp32 arithmetic, any head size. It serves fp32 tensors and the head sizes that
// the tensor-core version (attention_mma.cu) does not have. Then the merge of two sets of keys, the ops of sinks.h, and
// by_cudnn(), which chooses between these kernels and cuDNN's (attention_cudnn.cpp).
//
// One pattern serves all three kernels. A warp owns kOwn rows (queries, or keys in the backward pass of k and v); the
// block walks over tiles of 32 other rows in shared memory, one per lane. A score is a dot product in a lane; a sum
// over the tile goes through shuffles, in the order of the lanes. No score ever leaves the registers; nor do the sums
// of the own rows: loops over these are unrolled, because an array that is indexed at run time lies in local memory.
#include "01_single_gpu/ops/attention_cuda.cuh"
#include "01_single_gpu/ops/attention_cudnn.h"
#include "01_single_gpu/ops/sinks.h"

namespace train70b::cuda {
namespace {

constexpr int kOwn = 4, kWarps = 8, kTile = 32;
constexpr int kColumns = kMaxHeadDim / 32;  // of one row, per lane
constexpr int kPlainThreads = 32 * kWarps, kOwnPerBlock = kOwn * kWarps;

// Rows [begin, begin + count) of one head of x (rows, width) into tile (kTile, D + 1) fp32, the rest zeros. The odd row
// length keeps lanes that read the same column of different rows in different banks.
template <class T>
__device__ void load_tile(float* tile, const T* x, int64_t begin, int64_t count, int64_t width, int64_t column, int D) {
    for (int i = threadIdx.x; i < kTile * D; i += blockDim.x) {
        const int r = i / D, d = i % D;
        tile[r * (D + 1) + d] = r < count ? to_float(x[(begin + r) * width + column + d]) : 0.0f;
    }
}

// This warp's own rows, in shared memory at own (kOwn, D), to be read after the next barrier.
template <class T>
__device__ void load_own(float* own, const T* x, int64_t begin, int64_t count, int64_t width, int64_t column, int D) {
    for (int i = threadIdx.x % 32; i < kOwn * D; i += 32) {
        const int r = i / D, d = i % D;
        own[i] = r < count ? to_float(x[(begin + r) * width + column + d]) : 0.0f;
    }
}

__device__ float dot(const float* a, const float* b, int D) {
    float sum = 0;
    for (int d = 0; d < D; ++d) sum += a[d] * b[d];
    return sum;
}

// sum[c] += over the lanes' rows r of weight(r) * tile[r][c * 32 + lane]
__device__ void add_weighted(float (&sum)[kColumns], float weight, const float* tile, int D) {
    for (int r = 0; r < kTile; ++r) {
        const float w = __shfl_sync(~0u, weight, r);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
            const int d = c * 32 + threadIdx.x % 32;
            if (d < D) sum[c] += w * tile[r * (D + 1) + d];
        }
    }
}

template <class G>
__device__ void store_own(G* x, int64_t row, int64_t width, int64_t column, int D, const float (&sum)[kColumns],
                          float factor) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
        const int d = c * 32 + threadIdx.x % 32;
        if (d < D) x[row * width + column + d] = from_float<G>(sum[c] * factor);
    }
}

// grid: (query tiles, heads, batch)
template <class Documents, class T>
__global__ void __launch_bounds__(kPlainThreads, 2)
    forward_kernel(T* out, float* lse, const T* q, const T* k, const T* v, AttentionShape s, Documents documents) {
    extern __shared__ float memory[];
    const int D = int(s.head_dim), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *own = memory + warp * kOwn * D, *k_tile = memory + kOwnPerBlock * D, *v_tile = k_tile + kTile * (D + 1);
    const auto [head, kv_head, E, K, q_row, q_end, k_row, k_end] = block_work(s, blockIdx.y);
    const int64_t block_first = int64_t(blockIdx.x) * kOwnPerBlock, first = block_first + warp * kOwn;  // query
    const float factor = rsqrtf(float(D));
    load_own(own, q, q_row + first, s.query_len - first, E, head * D, D);

    float sum[kOwn][kColumns] = {}, row_max[kOwn], row_sum[kOwn] = {};
    for (float& m : row_max) m = -INFINITY;
    const int64_t last = min(block_first + kOwnPerBlock, s.query_len) - 1;
    const int64_t seen_by_block = visible_keys(s, last);
    for (int64_t j = documents.first_key(s, q_row, block_first) / kTile * kTile; j < seen_by_block; j += kTile) {
        __syncthreads();
        load_tile(k_tile, k, k_row + j, s.key_len - j, K, kv_head * D, D);
        load_tile(v_tile, v, k_row + j, s.key_len - j, K, kv_head * D, D);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < kOwn; ++r) {
            const int64_t key = j + lane;
            const bool visible = key < visible_keys(s, first + r) && key >= documents.first_key(s, q_row, first + r);
            const float score = visible ? dot(own + r * D, k_tile + lane * (D + 1), D) * factor : -INFINITY;
            const float max = fmaxf(row_max[r], warp_reduce(score, Max()));
            const float shift = max == -INFINITY ? 0.0f : max;  // nothing visible yet: exp(-inf - 0) = 0
            const float p = visible ? expf(score - shift) : 0.0f, shrink = expf(row_max[r] - shift);
            row_max[r] = max;
            row_sum[r] = row_sum[r] * shrink + warp_reduce(p, Sum());
            for (float& element : sum[r]) element *= shrink;
            add_weighted(sum[r], p, v_tile, D);
        }
    }
#pragma unroll
    for (int r = 0; r < kOwn && first + r < s.query_len; ++r) {
        const int64_t row = q_row + first + r;
        const bool blind = visible_keys(s, first + r) <= documents.first_key(s, q_row, first + r);
        store_own(out, row, E, head * D, D, sum[r], blind ? 0.0f : 1.0f / row_sum[r]);
        if (lane == 0) lse[row * s.heads + head] = blind ? -INFINITY : row_max[r] + logf(row_sum[r]);
    }
}

// dq = sum over keys of dS k. grid as above.
template <class Documents, class T, class G>
__global__ void __launch_bounds__(kPlainThreads, 2)
    backward_q_kernel(G* dq, const T* dout, const T* q, const T* k, const T* v, const float* lse, const float* delta,
                      AttentionShape s, Documents documents) {
    extern __shared__ float memory[];
    const int D = int(s.head_dim), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *own_q = memory + warp * 2 * kOwn * D, *own_do = own_q + kOwn * D;
    float *k_tile = memory + 2 * kOwnPerBlock * D, *v_tile = k_tile + kTile * (D + 1);
    const auto [head, kv_head, E, K, q_row, q_end, k_row, k_end] = block_work(s, blockIdx.y);
    const int64_t block_first = int64_t(blockIdx.x) * kOwnPerBlock, first = block_first + warp * kOwn;
    const float factor = rsqrtf(float(D));
    load_own(own_q, q, q_row + first, s.query_len - first, E, head * D, D);
    load_own(own_do, dout, q_row + first, s.query_len - first, E, head * D, D);

    float sum[kOwn][kColumns] = {};
    const int64_t last = min(block_first + kOwnPerBlock, s.query_len) - 1;
    const int64_t seen_by_block = visible_keys(s, last);
    for (int64_t j = documents.first_key(s, q_row, block_first) / kTile * kTile; j < seen_by_block; j += kTile) {
        __syncthreads();
        load_tile(k_tile, k, k_row + j, s.key_len - j, K, kv_head * D, D);
        load_tile(v_tile, v, k_row + j, s.key_len - j, K, kv_head * D, D);
        __syncthreads();
#pragma unroll
        for (int r = 0; r < kOwn && first + r < s.query_len; ++r) {
            const int64_t at = (q_row + first + r) * s.heads + head;
            float ds = 0;
            const int64_t key = j + lane;
            if (key < visible_keys(s, first + r) && key >= documents.first_key(s, q_row, first + r)) {
                const float p = expf(dot(own_q + r * D, k_tile + lane * (D + 1), D) * factor - lse[at]);
                ds = p * (dot(own_do + r * D, v_tile + lane * (D + 1), D) - delta[at]);
            }
            add_weighted(sum[r], ds, k_tile, D);
        }
    }
#pragma unroll
    for (int r = 0; r < kOwn && first + r < s.query_len; ++r)
        store_own(dq, q_row + first + r, E, head * D, D, sum[r], factor);
}

// dk = sum over queries of dS^T q, dv = sum of P^T dout, over all query heads of the group, one after the other.
// grid: (key tiles, kv heads, batch)
template <class Documents, class T, class G>
__global__ void __launch_bounds__(kPlainThreads, 2)
    backward_kv_kernel(G* dk, G* dv, const T* dout, const T* q, const T* k, const T* v, const float* lse,
                       const float* delta, AttentionShape s, Documents documents) {
    extern __shared__ float memory[];
    const int D = int(s.head_dim), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float *own_k = memory + warp * 2 * kOwn * D, *own_v = own_k + kOwn * D;
    float *q_tile = memory + 2 * kOwnPerBlock * D, *do_tile = q_tile + kTile * (D + 1);
    const int64_t group = s.heads / s.kv_heads;  // query heads of this key/value head
    const auto [first_head, kv_head, E, K, q_row, q_end, k_row, k_end] = block_work(s, blockIdx.y * group);
    const int64_t block_first = int64_t(blockIdx.x) * kOwnPerBlock, first = block_first + warp * kOwn;  // key
    const float factor = rsqrtf(float(D));
    load_own(own_k, k, k_row + first, s.key_len - first, K, kv_head * D, D);
    load_own(own_v, v, k_row + first, s.key_len - first, K, kv_head * D, D);

    float sum_k[kOwn][kColumns] = {}, sum_v[kOwn][kColumns] = {};
    // Queries before and after these see none of the block's keys.
    const int64_t begin = first_query(s, block_first) / kTile * kTile;
    const int64_t end = documents.end_query(s, q_row, min(block_first + kOwnPerBlock, s.key_len) - 1);
    for (int64_t head = first_head; head < first_head + group; ++head) {
        for (int64_t i = begin; i < end; i += kTile) {
            __syncthreads();
            load_tile(q_tile, q, q_row + i, s.query_len - i, E, head * D, D);
            load_tile(do_tile, dout, q_row + i, s.query_len - i, E, head * D, D);
            __syncthreads();
            const int64_t query = i + lane, at = (q_row + query) * s.heads + head;
#pragma unroll
            for (int r = 0; r < kOwn; ++r) {
                float p = 0, ds = 0;
                const int64_t key = first + r;
                if (query < s.query_len && key < visible_keys(s, query) &&
                    key >= documents.first_key(s, q_row, query)) {
                    p = expf(dot(own_k + r * D, q_tile + lane * (D + 1), D) * factor - lse[at]);
                    ds = p * (dot(own_v + r * D, do_tile + lane * (D + 1), D) - delta[at]);
                }
                add_weighted(sum_v[r], p, do_tile, D);
                add_weighted(sum_k[r], ds, q_tile, D);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < kOwn && first + r < s.key_len; ++r) {
        store_own(dk, k_row + first + r, K, kv_head * D, D, sum_k[r], factor);
        store_own(dv, k_row + first + r, K, kv_head * D, D, sum_v[r], 1);
    }
}

// delta (rows, H) = sum over a head's columns of dout * out; one warp each.
template <class T>
__global__ void delta_kernel(float* delta, const T* dout, const T* out, int64_t rows, int64_t heads, int D) {
    const int64_t at = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (at >= rows * heads) return;
    float sum = 0;
    for (int d = threadIdx.x % 32; d < D; d += 32) sum += to_float(dout[at * D + d]) * to_float(out[at * D + d]);
    sum = warp_reduce(sum, Sum());
    if (threadIdx.x % 32 == 0) delta[at] = sum;
}

// One block for each row and head.
template <class T>
__global__ void merge_attention_kernel(float* out, float* lse, const T* part_out, const float* part_lse,
                                       int64_t width) {
    const int64_t i = blockIdx.x;
    const float l1 = lse[i], l2 = part_lse[i], largest = fmaxf(l1, l2);
    if (largest == -INFINITY) return;
    const float l = largest + logf(expf(l1 - largest) + expf(l2 - largest));
    const float keep = expf(l1 - l), take = expf(l2 - l);
    for (int64_t d = threadIdx.x; d < width; d += blockDim.x)
        out[i * width + d] = out[i * width + d] * keep + to_float(part_out[i * width + d]) * take;
    __syncthreads();  // all have read lse[i]
    if (threadIdx.x == 0) lse[i] = l;
}

// ---- sinks.h: a warp for each row and head ----
constexpr int kHeadsOfBlock = kThreads / 32;

template <class T>
__global__ void add_sinks_kernel(T* out, float* lse, const T* sinks, int64_t count, int64_t heads, int64_t width) {
    const int64_t i = int64_t(blockIdx.x) * kHeadsOfBlock + threadIdx.x / 32;
    if (i >= count) return;
    const float l = lse[i], sink = to_float(sinks[i % heads]), largest = fmaxf(l, sink);
    const float with_sink = largest + logf(expf(l - largest) + expf(sink - largest)), keep = expf(l - with_sink);
    for (int64_t d = threadIdx.x % 32; d < width; d += 32)
        out[i * width + d] = from_float<T>(to_float(out[i * width + d]) * keep);
    __syncwarp();  // all have read lse[i]
    if (threadIdx.x % 32 == 0) lse[i] = with_sink;
}

template <class T>
__global__ void sink_terms_kernel(float* terms, const T* dout, const T* out, const float* lse, const T* sinks,
                                  int64_t count, int64_t heads, int64_t width) {
    const int64_t i = int64_t(blockIdx.x) * kHeadsOfBlock + threadIdx.x / 32;
    if (i >= count) return;
    float delta = 0;
    for (int64_t d = threadIdx.x % 32; d < width; d += 32)
        delta += to_float(dout[i * width + d]) * to_float(out[i * width + d]);
    delta = warp_reduce(delta, Sum());
    if (threadIdx.x % 32 == 0) terms[i] = -expf(to_float(sinks[i % heads]) - lse[i]) * delta;
}

// The packed side is written, or read, in its own order: (B, h, Tq) beside columns of (B*Tq, H).
__global__ void pack_lse_kernel(float* packed, float* lse, AttentionShape s, int64_t first, int64_t count,
                                PackLse direction) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= s.batch * count * s.query_len) return;
    const int64_t query = i % s.query_len, head = i / s.query_len % count, b = i / s.query_len / count;
    float& other = lse[(b * s.query_len + query) * s.heads + first + head];
    if (direction == PackLse::there)
        packed[i] = other;
    else
        other = packed[i];
}

Grid grid_over(int64_t rows, int64_t heads, int64_t batch, int copies_of_own, int64_t D) {
    return {dim3(blocks_for(rows, kOwnPerBlock), unsigned(heads), unsigned(batch)), kPlainThreads,
            (copies_of_own * kOwnPerBlock * D + 2 * kTile * (D + 1)) * sizeof(float)};
}

}  // namespace

void pack_lse(Tensor& packed, const Tensor& lse, const AttentionShape& s, int64_t first, PackLse direction) {
    launch(pack_lse_kernel, {blocks_for(packed.size(), kThreads)}, packed, lse, s, first,
           packed.size() / (s.batch * s.query_len), direction);
}

#if TRAIN70B_CUDNN
// Whether cuDNN computes this call. --attention cudnn: if not, a usage error.
static bool by_cudnn(DType dtype, const AttentionShape& s, const DocumentStarts& documents, bool backward) {
    if (attention_by == AttentionBy::own) return false;
    std::string why = why_not_cudnn(Device::cuda, dtype, s.head_dim, bool(documents));
    if (why.empty()) why = cudnn_lacks(s, backward);
    if (!why.empty() && attention_by == AttentionBy::cudnn)
        usage_error("--attention cudnn: {} (try --attention auto)", why);
    return why.empty();
}
#else
std::string why_no_cudnn() { return "this build has no cuDNN (cudnn.h and cudnn_frontend.h were not found)"; }
std::string cudnn_version() { return ""; }
#endif

void attention(Tensor& out, Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& s,
               const DocumentStarts& documents) {
#if TRAIN70B_CUDNN
    if (by_cudnn(q.dtype(), s, documents, false)) return cudnn_attention(out, lse, q, k, v, s);
#endif
    if (mma_can(q.dtype(), s)) return mma_attention(out, lse, q, k, v, s, documents);
    with_float(q.dtype(), [&]<class T>(T) {
        with_documents(documents, [&]<class Documents>(Documents mask) {
            launch(forward_kernel<Documents, T>, grid_over(s.query_len, s.heads, s.batch, 1, s.head_dim), out, lse, q,
                   k, v, s, mask);
        });
    });
}

void attention_backward(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q, const Tensor& k,
                        const Tensor& v, const Tensor& out, const Tensor& lse, const AttentionShape& s,
                        const DocumentStarts& documents) {
    CHECK(dq.dtype() == dk.dtype() && dk.dtype() == dv.dtype(), "dq {}, dk {}, dv {}", name_of(dq.dtype()),
          name_of(dk.dtype()), name_of(dv.dtype()));
#if TRAIN70B_CUDNN
    if (by_cudnn(q.dtype(), s, documents, true))
        return cudnn_attention_backward(dq, dk, dv, dout, q, k, v, out, lse, s);
#endif
    const int64_t rows = q.rows();
    Tensor delta({rows, s.heads}, DType::f32, Device::cuda, Memory::workspace);
    with_float(q.dtype(), [&]<class T>(T) {
        launch(delta_kernel<T>, {blocks_for(rows * s.heads * 32, kThreads)}, delta, dout, out, rows, s.heads,
               int(s.head_dim));
    });
    if (mma_can(q.dtype(), s)) return mma_attention_backward(dq, dk, dv, dout, q, k, v, lse, delta, s, documents);
    with_float(q.dtype(), dq.dtype(), [&]<class T, class G>(T, G) {
        with_documents(documents, [&]<class Documents>(Documents mask) {
            launch(backward_q_kernel<Documents, T, G>, grid_over(s.query_len, s.heads, s.batch, 2, s.head_dim), dq,
                   dout, q, k, v, lse, delta, s, mask);
            launch(backward_kv_kernel<Documents, T, G>, grid_over(s.key_len, s.kv_heads, s.batch, 2, s.head_dim), dk,
                   dv, dout, q, k, v, lse, delta, s, mask);
        });
    });
}

void merge_attention(Tensor& out, Tensor& lse, const Tensor& part_out, const Tensor& part_lse) {
    const int64_t width = out.cols() / lse.cols();
    with_float(part_out.dtype(), [&]<class T>(T) {
        launch(merge_attention_kernel<T>, {blocks_for(lse.size(), 1), 128}, out, lse, part_out, part_lse, width);
    });
}

void add_sinks(Tensor& out, Tensor& lse, const Tensor& sinks) {
    with_float(out.dtype(), [&]<class T>(T) {
        launch(add_sinks_kernel<T>, {blocks_for(lse.size(), kHeadsOfBlock)}, out, lse, sinks, lse.size(), lse.cols(),
               out.cols() / lse.cols());
    });
}

void sink_terms(Tensor& terms, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& sinks) {
    with_float(out.dtype(), [&]<class T>(T) {
        launch(sink_terms_kernel<T>, {blocks_for(lse.size(), kHeadsOfBlock)}, terms, dout, out, lse, sinks, lse.size(),
               lse.cols(), out.cols() / lse.cols());
    });
}

}  // namespace train70b::cuda
