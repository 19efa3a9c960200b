// Attention on tensor cores: bf16 products, fp32 sums (mma.sync m16n8k16), head sizes 64 and 128.
//
// All of it is two products of a warp's 16 own rows with a tile of other rows, both from shared memory:
//   product_nt   C (16, N)  = A (16, D) B (N, D)^T       scores: S = Q K^T,  dP = dO V^T
//   product_nn   C (16, D) += P (16, N) B (N, D)         sums:   O += P V,  dQ += dS K,  dV += P^T dO,  dK += dS^T Q
// P is the result of the first kind of product and the left side of the second without leaving the registers: the
// layout of an accumulator is that of a left operand (Dao 2023, section 3). Rows lie D + 8 elements apart, so that the
// eight rows which one ldmatrix reads fall into different banks.
//
// Layout of a C fragment, per thread with g = lane / 4 and t = lane % 4: rows g and g + 8, columns 8 n + 2 t and + 1:
//   c[n][0], c[n][1] in row g;  c[n][2], c[n][3] in row g + 8.
#include <functional>

#include "01_single_gpu/ops/attention_cuda.cuh"

namespace train70b::cuda {
namespace {

using bf16 = __nv_bfloat16;

constexpr float kLog2E = 1.44269504f;

__device__ void load_matrices(uint32_t (&r)[4], const bf16* p) {  // four 8 x 8 matrices, one row address per lane
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(p));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ void load_matrices_transposed(uint32_t (&r)[4], const bf16* p) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(p));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {  // c += a (16, 16) b (16, 8)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
}

template <int D>
constexpr int kStride = D + 8;  // elements from one row in shared memory to the next

// c (16, N) = a (16, D) b (N, D)^T; a and b point to their first rows in shared memory.
template <int D, int N>
__device__ void product_nt(float (&c)[N / 8][4], const bf16* a, const bf16* b) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N / 8; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0;
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        uint32_t left[4];
        load_matrices(left, a + (lane % 16) * kStride<D> + k + lane / 16 * 8);
#pragma unroll
        for (int n = 0; n < N; n += 16) {
            uint32_t right[4];
            load_matrices(right, b + (n + lane / 16 * 8 + lane % 8) * kStride<D> + k + lane / 8 % 2 * 8);
            mma(c[n / 8], left, right[0], right[1]);
            mma(c[n / 8 + 1], left, right[2], right[3]);
        }
    }
}

// c (16, D) += p (16, N) b (N, D), p rounded to bf16.
template <int D, int N>
__device__ void product_nn(float (&c)[D / 8][4], const float (&p)[N / 8][4], const bf16* b) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < N; k += 16) {
        const float(&first)[4] = p[k / 8], (&second)[4] = p[k / 8 + 1];
        const uint32_t left[4] = {pack(first[0], first[1]), pack(first[2], first[3]), pack(second[0], second[1]),
                                  pack(second[2], second[3])};
#pragma unroll
        for (int n = 0; n < D; n += 16) {
            uint32_t right[4];
            load_matrices_transposed(right, b + (k + lane / 8 % 2 * 8 + lane % 8) * kStride<D> + n + lane / 16 * 8);
            mma(c[n / 8], left, right[0], right[1]);
            mma(c[n / 8 + 1], left, right[2], right[3]);
        }
    }
}

// Rows [begin, begin + Rows) of one head into shared memory, rows from `end` on as zeros.
template <int D, int Rows>
__device__ void load_rows(bf16* tile, const bf16* x, int64_t begin, int64_t end, int64_t width, int64_t column) {
    constexpr int per_row = D / 8;  // 16-byte pieces
    for (int i = threadIdx.x; i < Rows * per_row; i += blockDim.x) {
        const int r = i / per_row, d = i % per_row * 8;
        uint4 piece = {};
        if (begin + r < end) piece = *reinterpret_cast<const uint4*>(x + (begin + r) * width + column + d);
        *reinterpret_cast<uint4*>(tile + r * kStride<D> + d) = piece;
    }
}

// A warp's (16, D) sums to rows [row, row + 16) of x, as far as `end`.
template <int D, class G>
__device__ void store_rows(G* x, int64_t row, int64_t end, int64_t width, int64_t column, const float (&c)[D / 8][4],
                           float factor_g, float factor_g8) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int64_t r = row + g + 8 * half;
            const float factor = half ? factor_g8 : factor_g;
            if (r >= end) continue;
            G* p = x + r * width + column + 8 * n + 2 * t;
            p[0] = from_float<G>(c[n][2 * half] * factor);
            p[1] = from_float<G>(c[n][2 * half + 1] * factor);
        }
}

__device__ float quad_max(float x) {  // over the four threads that share a row
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// ---- forward: a block has 16 queries per warp and walks over the keys -----------------------------------------------
constexpr int kForwardWarps = 8, kForwardKeys = 64;

template <int D, class Documents>
__global__ void __launch_bounds__(32 * kForwardWarps)
    forward_kernel(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v, AttentionShape s,
                   Documents documents) {
    constexpr int kQueries = 16 * kForwardWarps, kKeys = kForwardKeys;
    extern __shared__ uint4 memory[];
    bf16 *q_tile = reinterpret_cast<bf16*>(memory), *k_tile = q_tile + kQueries * kStride<D>,
         *v_tile = k_tile + kKeys * kStride<D>;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    // The longest rows of blocks first: under the causal mask the last queries have the most work.
    const int64_t block_first = int64_t(gridDim.x - 1 - blockIdx.x) * kQueries, first = block_first + warp * 16;
    const auto [head, kv_head, E, K, q_row, q_end, k_row, k_end] = block_work(s, blockIdx.y);
    const float factor = rsqrtf(float(D)) * kLog2E;  // scores in powers of two: exp2 is the hardware's exponential

    load_rows<D, kQueries>(q_tile, q, q_row + block_first, q_end, E, head * D);
    float sum[D / 8][4] = {};                                    // (16, D)
    float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};  // of rows g and g + 8; row_sum: this thread's columns
    const int64_t hidden[2] = {documents.first_key(s, q_row, first + g), documents.first_key(s, q_row, first + g + 8)};
    const int64_t visible[2] = {visible_keys(s, first + g), visible_keys(s, first + g + 8)};
    const int64_t seen_by_block = visible_keys(s, min(block_first + kQueries, s.query_len) - 1);
    const int64_t warp_hidden = documents.first_key(s, q_row, first), seen_by_warp = visible_keys(s, first + 15);
    for (int64_t j = documents.first_key(s, q_row, block_first) / kKeys * kKeys; j < seen_by_block; j += kKeys) {
        __syncthreads();
        load_rows<D, kKeys>(k_tile, k, k_row + j, k_end, K, kv_head * D);
        load_rows<D, kKeys>(v_tile, v, k_row + j, k_end, K, kv_head * D);
        __syncthreads();
        if (Documents::kPacked && (j + kKeys <= warp_hidden || j >= seen_by_warp)) continue;
        float p[kKeys / 8][4];
        product_nt<D, kKeys>(p, q_tile + warp * 16 * kStride<D>, k_tile);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float max = row_max[half];
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& score = p[n][2 * half + c];
                    const int64_t key = j + 8 * n + 2 * t + c;
                    score = key < visible[half] && key >= hidden[half] ? score * factor : -INFINITY;
                    max = fmaxf(max, score);
                }
            max = quad_max(max);
            const float shift = max == -INFINITY ? 0.0f : max;  // nothing visible yet: exp2(-inf - 0) = 0
            const float shrink = exp2f(row_max[half] - shift);
            row_max[half] = max;
            row_sum[half] *= shrink;
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c) row_sum[half] += p[n][2 * half + c] = exp2f(p[n][2 * half + c] - shift);
#pragma unroll
            for (int n = 0; n < D / 8; ++n) {
                sum[n][2 * half] *= shrink;
                sum[n][2 * half + 1] *= shrink;
            }
        }
        product_nn<D, kKeys>(sum, p, v_tile);
    }
    float normalise[2];
    for (int half = 0; half < 2; ++half) {
        const float total = quad_sum(row_sum[half]);
        const int64_t query = first + g + 8 * half;
        const bool blind = visible[half] <= hidden[half];
        normalise[half] = blind ? 0.0f : 1.0f / total;
        if (t == 0 && query < s.query_len)
            lse[(q_row + query) * s.heads + head] = blind ? -INFINITY : row_max[half] / kLog2E + logf(total);
    }
    store_rows<D>(out, q_row + first, q_end, E, head * D, sum, normalise[0], normalise[1]);
}

// ---- backward, dq: a block has 16 queries per warp and walks over the keys ------------------------------------------
constexpr int kBackwardWarps = 4, kBackwardTile = 32;

template <int D, class Documents, class G>
__global__ void __launch_bounds__(32 * kBackwardWarps)
    backward_q_kernel(G* dq, const bf16* dout, const bf16* q, const bf16* k, const bf16* v, const float* lse,
                      const float* delta, AttentionShape s, Documents documents) {
    constexpr int kQueries = 16 * kBackwardWarps, kKeys = kBackwardTile;
    extern __shared__ uint4 memory[];
    bf16 *q_tile = reinterpret_cast<bf16*>(memory), *do_tile = q_tile + kQueries * kStride<D>,
         *k_tile = do_tile + kQueries * kStride<D>, *v_tile = k_tile + kKeys * kStride<D>;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int64_t block_first = int64_t(gridDim.x - 1 - blockIdx.x) * kQueries, first = block_first + warp * 16;
    const auto [head, kv_head, E, K, q_row, q_end, k_row, k_end] = block_work(s, blockIdx.y);
    const float factor = rsqrtf(float(D));

    load_rows<D, kQueries>(q_tile, q, q_row + block_first, q_end, E, head * D);
    load_rows<D, kQueries>(do_tile, dout, q_row + block_first, q_end, E, head * D);
    float row_lse[2] = {}, row_delta[2] = {};
    int64_t hidden[2] = {}, visible[2] = {};
    for (int half = 0; half < 2; ++half)
        if (const int64_t query = first + g + 8 * half; query < s.query_len) {
            row_lse[half] = lse[(q_row + query) * s.heads + head] * kLog2E;
            row_delta[half] = delta[(q_row + query) * s.heads + head];
            hidden[half] = documents.first_key(s, q_row, query);
            visible[half] = visible_keys(s, query);
        }
    float sum[D / 8][4] = {};
    const int64_t seen_by_block = visible_keys(s, min(block_first + kQueries, s.query_len) - 1);
    const int64_t warp_hidden = documents.first_key(s, q_row, first), seen_by_warp = visible_keys(s, first + 15);
    for (int64_t j = documents.first_key(s, q_row, block_first) / kKeys * kKeys; j < seen_by_block; j += kKeys) {
        __syncthreads();
        load_rows<D, kKeys>(k_tile, k, k_row + j, k_end, K, kv_head * D);
        load_rows<D, kKeys>(v_tile, v, k_row + j, k_end, K, kv_head * D);
        __syncthreads();
        if (Documents::kPacked && (j + kKeys <= warp_hidden || j >= seen_by_warp)) continue;
        float p[kKeys / 8][4], dp[kKeys / 8][4];
        product_nt<D, kKeys>(p, q_tile + warp * 16 * kStride<D>, k_tile);
        product_nt<D, kKeys>(dp, do_tile + warp * 16 * kStride<D>, v_tile);
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int64_t key = j + 8 * n + 2 * t + c % 2;
                const bool seen = key < visible[c / 2] && key >= hidden[c / 2];
                const float weight = seen ? exp2f(p[n][c] * factor * kLog2E - row_lse[c / 2]) : 0.0f;
                dp[n][c] = weight * (dp[n][c] - row_delta[c / 2]);  // dS
            }
        product_nn<D, kKeys>(sum, dp, k_tile);
    }
    store_rows<D>(dq, q_row + first, q_end, E, head * D, sum, factor, factor);
}

// ---- backward, dk and dv: a block has 16 keys per warp and walks over the queries of every head of the group --------
template <int D, class Documents, class G>
__global__ void __launch_bounds__(32 * kBackwardWarps)
    backward_kv_kernel(G* dk, G* dv, const bf16* dout, const bf16* q, const bf16* k, const bf16* v, const float* lse,
                       const float* delta, AttentionShape s, Documents documents) {
    constexpr int kKeys = 16 * kBackwardWarps, kQueries = kBackwardTile;
    extern __shared__ uint4 memory[];
    bf16 *k_tile = reinterpret_cast<bf16*>(memory), *v_tile = k_tile + kKeys * kStride<D>,
         *q_tile = v_tile + kKeys * kStride<D>, *do_tile = q_tile + kQueries * kStride<D>;
    __shared__ float tile_lse[kQueries], tile_delta[kQueries];
    __shared__ int64_t tile_hidden[kQueries];  // with documents
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    const int64_t block_first = int64_t(blockIdx.x) * kKeys, first = block_first + warp * 16;
    const int64_t group = s.heads / s.kv_heads;  // query heads of this key/value head
    const auto [first_head, kv_head, E, K, q_row, q_end, k_row, k_end] = block_work(s, blockIdx.y * group);
    const float factor = rsqrtf(float(D));

    load_rows<D, kKeys>(k_tile, k, k_row + block_first, k_end, K, kv_head * D);
    load_rows<D, kKeys>(v_tile, v, k_row + block_first, k_end, K, kv_head * D);
    float sum_k[D / 8][4] = {}, sum_v[D / 8][4] = {};
    const int64_t begin = first_query(s, block_first) / kQueries * kQueries;
    const int64_t end = documents.end_query(s, q_row, min(block_first + kKeys, s.key_len) - 1);
    const int64_t warp_begin = first_query(s, first), warp_end = documents.end_query(s, q_row, first + 15);
    for (int64_t head = first_head; head < first_head + group; ++head) {
        for (int64_t i = begin; i < end; i += kQueries) {
            __syncthreads();
            load_rows<D, kQueries>(q_tile, q, q_row + i, q_end, E, head * D);
            load_rows<D, kQueries>(do_tile, dout, q_row + i, q_end, E, head * D);
            if (threadIdx.x < kQueries && i + threadIdx.x < s.query_len) {
                tile_lse[threadIdx.x] = lse[(q_row + i + threadIdx.x) * s.heads + head] * kLog2E;
                tile_delta[threadIdx.x] = delta[(q_row + i + threadIdx.x) * s.heads + head];
                if constexpr (Documents::kPacked)
                    tile_hidden[threadIdx.x] = documents.first_key(s, q_row, i + threadIdx.x);
            }
            __syncthreads();
            if (Documents::kPacked && (i + kQueries <= warp_begin || i >= warp_end)) continue;
            float p[kQueries / 8][4], dp[kQueries / 8][4];  // transposed: (keys, queries)
            product_nt<D, kQueries>(p, k_tile + warp * 16 * kStride<D>, q_tile);
            product_nt<D, kQueries>(dp, v_tile + warp * 16 * kStride<D>, do_tile);
#pragma unroll
            for (int n = 0; n < kQueries / 8; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const int column = 8 * n + 2 * t + c % 2;
                    const int64_t query = i + column, key = first + g + 8 * (c / 2);
                    const bool seen = query < s.query_len && key < visible_keys(s, query) &&
                                      (!Documents::kPacked || key >= tile_hidden[column]);
                    p[n][c] = seen ? exp2f(p[n][c] * factor * kLog2E - tile_lse[column]) : 0.0f;
                    dp[n][c] = seen ? p[n][c] * (dp[n][c] - tile_delta[column]) : 0.0f;
                }
            product_nn<D, kQueries>(sum_v, p, do_tile);
            product_nn<D, kQueries>(sum_k, dp, q_tile);
        }
    }
    store_rows<D>(dk, k_row + first, k_end, K, kv_head * D, sum_k, factor, factor);
    store_rows<D>(dv, k_row + first, k_end, K, kv_head * D, sum_v, 1, 1);
}

template <class Body>
void with_head_dim(int64_t head_dim, Body&& body) {
    if (head_dim == 64)
        body(std::integral_constant<int, 64>());
    else
        body(std::integral_constant<int, 128>());
}

void check_aligned(std::initializer_list<std::reference_wrapper<const Tensor>> tensors) {
    for (const Tensor& x : tensors)
        CHECK(reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0, "{} does not begin on 16 bytes", to_string(x.shape()));
}

}  // namespace

bool mma_can(DType dtype, const AttentionShape& s) {
    return dtype == DType::bf16 && (s.head_dim == 64 || s.head_dim == 128);
}

void mma_attention(Tensor& out, Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& s,
                   const DocumentStarts& documents) {
    check_aligned({q, k, v});
    with_head_dim(s.head_dim, [&](auto dim) {
        with_documents(documents, [&](auto mask) {
            constexpr int D = decltype(dim)::value, kQueries = 16 * kForwardWarps;
            const size_t bytes = (kQueries + 2 * kForwardKeys) * kStride<D> * sizeof(bf16);
            const dim3 blocks(blocks_for(s.query_len, kQueries), unsigned(s.heads), unsigned(s.batch));
            launch(forward_kernel<D, decltype(mask)>, {blocks, 32 * kForwardWarps, bytes}, out.data<bf16>(),
                   lse.data<float>(), q.data<bf16>(), k.data<bf16>(), v.data<bf16>(), s, mask);
        });
    });
}

void mma_attention_backward(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q, const Tensor& k,
                            const Tensor& v, const Tensor& lse, const Tensor& delta, const AttentionShape& s,
                            const DocumentStarts& documents) {
    check_aligned({dout, q, k, v});
    const auto run = [&](auto dim, auto grad_zero, auto mask) {
        using G = decltype(grad_zero);
        using Documents = decltype(mask);
        constexpr int D = decltype(dim)::value, kOwnRows = 16 * kBackwardWarps;
        const size_t bytes = 2 * (kOwnRows + kBackwardTile) * kStride<D> * sizeof(bf16);
        const dim3 query_blocks(blocks_for(s.query_len, kOwnRows), unsigned(s.heads), unsigned(s.batch));
        const dim3 key_blocks(blocks_for(s.key_len, kOwnRows), unsigned(s.kv_heads), unsigned(s.batch));
        launch(backward_q_kernel<D, Documents, G>, {query_blocks, 32 * kBackwardWarps, bytes}, dq.data<G>(),
               dout.data<bf16>(), q.data<bf16>(), k.data<bf16>(), v.data<bf16>(), lse.data<float>(),
               delta.data<float>(), s, mask);
        launch(backward_kv_kernel<D, Documents, G>, {key_blocks, 32 * kBackwardWarps, bytes}, dk.data<G>(),
               dv.data<G>(), dout.data<bf16>(), q.data<bf16>(), k.data<bf16>(), v.data<bf16>(), lse.data<float>(),
               delta.data<float>(), s, mask);
    };
    with_head_dim(s.head_dim, [&](auto dim) {
        with_float(dq.dtype(),
                   [&](auto grad_zero) { with_documents(documents, [&](auto mask) { run(dim, grad_zero, mask); }); });
    });
}

}  // namespace train70b::cuda
