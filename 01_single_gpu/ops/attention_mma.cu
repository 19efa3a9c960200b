// Attention on tensor cores: bf16 products, fp32 sums, head sizes 64 and 128 (attention_tiles.cuh has the products).
//
// In all three kernels a warp owns 16 rows and the block walks over tiles of other rows. While a tile is multiplied the
// next one is in flight, so that no warp waits for memory in every tile: arrived() stands before the first use of a
// tile, and right behind it begins the copy into the place that everybody has just left.
#include <functional>

#include "01_single_gpu/ops/attention_cuda.cuh"
#include "01_single_gpu/ops/attention_tiles.cuh"

namespace train70b::cuda {
namespace {

constexpr float kLog2E = 1.44269504f;

// The head of queries, and that of keys and values, which belong together.
__device__ Head query_head(const AttentionShape& s, int head) { return {int(s.query_len), int(s.heads), head}; }
__device__ Head key_head(const AttentionShape& s, int head) {
    return {int(s.key_len), int(s.kv_heads), head / int(s.heads / s.kv_heads)};
}

// Of each of the block's queries from `first` on, the keys that it sees; queries behind the last one see none.
template <int Rows, class Documents>
__device__ void find_seen(Columns (&seen)[Rows], const Documents& documents, const AttentionShape& s, int first) {
    const int query = first + int(threadIdx.x), keys = int(s.key_len);
    const int64_t q_row = blockIdx.z * s.query_len;
    if (threadIdx.x < Rows)
        seen[threadIdx.x] = query < s.query_len
                                ? Columns{int(documents.first_key(s, q_row, query)), int(visible_keys(s, query))}
                                : Columns{keys, keys};
    __syncthreads();
}

// ---- forward: a block has 16 queries per warp and walks over the keys -----------------------------------------------
constexpr int kForwardWarps = 8, kForwardKeys = 64;

template <int D, class Documents>
__global__ void __launch_bounds__(32 * kForwardWarps, 2)  // two blocks per SM: at most 128 registers
    forward_kernel(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v, AttentionShape s,
                   Documents documents) {
    constexpr int kThreads = 32 * kForwardWarps, kQueries = 16 * kForwardWarps, kKeys = kForwardKeys;
    extern __shared__ uint4 memory[];
    bf16 *q_tile = reinterpret_cast<bf16*>(memory), *k_tile = q_tile + kQueries * kStride<D>,
         *v_tile = k_tile + kKeys * kStride<D>;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    // The longest rows of blocks first: under the causal mask the last queries have the most work.
    const int block_first = int(gridDim.x - 1 - blockIdx.x) * kQueries, first = block_first + warp * 16;
    const Head of_q = query_head(s, int(blockIdx.y)), of_k = key_head(s, of_q.head);

    copy_rows<D, kQueries, kThreads>(q_tile, q, of_q, block_first);
    __shared__ Columns seen[kQueries];
    find_seen(seen, documents, s, block_first);
    const int begin = seen[0].begin / kKeys * kKeys, end = seen[min(kQueries, of_q.len - block_first) - 1].end;
    const float factor = rsqrtf(float(D)) * kLog2E;  // scores in powers of two: exp2 is the hardware's exponential
    if (begin < end) copy_rows<D, kKeys, kThreads>(k_tile, k, of_k, begin);

    float sum[D / 8][4] = {};                                    // (16, D)
    float row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};  // of rows g and g + 8; row_sum: this thread's columns
    for (int j = begin; j < end; j += kKeys) {
        float p[kKeys / 8][4];
        const bool sees = some_seen(seen + warp * 16, j, j + kKeys);
        arrived();  // these keys
        copy_rows<D, kKeys, kThreads>(v_tile, v, of_k, j);
        if (sees) product_nt<D, kKeys>(p, q_tile + warp * 16 * kStride<D>, k_tile);
        arrived();  // their values
        if (j + kKeys < end) copy_rows<D, kKeys, kThreads>(k_tile, k, of_k, j + kKeys);
        if (!sees) continue;
        where_hidden<kKeys>(seen + warp * 16, j, [&](int n, int c) { p[n][c] = -INFINITY; });
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float max = row_max[half];
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n) max = fmaxf(max, fmaxf(p[n][2 * half], p[n][2 * half + 1]));
            max = quad_max(max);
            const float shift = max == -INFINITY ? 0.0f : max * factor;  // nothing visible yet: exp2(-inf - 0) = 0
            const float shrink = exp2_fast(row_max[half] * factor - shift);
            row_max[half] = max;
            row_sum[half] *= shrink;
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
                for (int c = 2 * half; c < 2 * half + 2; ++c)
                    row_sum[half] += p[n][c] = exp2_fast(p[n][c] * factor - shift);
            if (shrink == 1) continue;  // late tiles rarely have a new maximum
#pragma unroll
            for (int n = 0; n < D / 8; ++n) {
                sum[n][2 * half] *= shrink;
                sum[n][2 * half + 1] *= shrink;
            }
        }
        product_nn<D, kKeys>(sum, p, v_tile);
    }
    arrived();  // the queries of a block that sees no key
    float normalise[2];
    for (int half = 0; half < 2; ++half) {
        const float total = quad_sum(row_sum[half]);
        const int query = first + g + 8 * half;
        const bool blind = total == 0;  // it sees no key
        normalise[half] = blind ? 0.0f : 1.0f / total;
        if (t == 0 && query < of_q.len)
            lse[of_q.row(query) * s.heads + of_q.head] =
                blind ? -INFINITY : row_max[half] * factor / kLog2E + logf(total);
    }
    store_rows<D>(out, of_q, first, sum, normalise[0], normalise[1]);
}

// ---- backward, dq: a block has 16 queries per warp and walks over the keys ------------------------------------------
// Both backward kernels have two places for a tile: one is read while the next tile is on its way to the other.
constexpr int kBackwardWarps = 4, kBackwardTile = 32, kBackwardThreads = 32 * kBackwardWarps;

template <int D, class Documents, class G>
__global__ void __launch_bounds__(kBackwardThreads, D == 64 ? 4 : 3)
    backward_q_kernel(G* dq, const bf16* dout, const bf16* q, const bf16* k, const bf16* v, const float* lse,
                      const float* delta, AttentionShape s, Documents documents) {
    constexpr int kQueries = 16 * kBackwardWarps, kKeys = kBackwardTile, kTile = kKeys * kStride<D>;
    extern __shared__ uint4 memory[];
    bf16 *q_tile = reinterpret_cast<bf16*>(memory), *do_tile = q_tile + kQueries * kStride<D>,
         *k_tiles = do_tile + kQueries * kStride<D>, *v_tiles = k_tiles + 2 * kTile;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    const int block_first = int(gridDim.x - 1 - blockIdx.x) * kQueries, first = block_first + warp * 16;
    const Head of_q = query_head(s, int(blockIdx.y)), of_k = key_head(s, of_q.head);
    copy_rows<D, kQueries, kBackwardThreads>(q_tile, q, of_q, block_first);
    copy_rows<D, kQueries, kBackwardThreads>(do_tile, dout, of_q, block_first);
    __shared__ Columns seen[kQueries];
    find_seen(seen, documents, s, block_first);
    const int begin = seen[0].begin / kKeys * kKeys, end = seen[min(kQueries, of_q.len - block_first) - 1].end;
    const float factor = rsqrtf(float(D));

    const auto copy_keys = [&](int j) {
        const int place = j / kKeys % 2 * kTile;
        copy_rows<D, kKeys, kBackwardThreads>(k_tiles + place, k, of_k, j);
        copy_rows<D, kKeys, kBackwardThreads>(v_tiles + place, v, of_k, j);
    };
    if (begin < end) copy_keys(begin);
    float row_lse[2] = {}, row_delta[2] = {};
    for (int half = 0; half < 2; ++half)
        if (const int query = first + g + 8 * half; query < of_q.len) {
            row_lse[half] = lse[of_q.row(query) * s.heads + of_q.head] * kLog2E;
            row_delta[half] = delta[of_q.row(query) * s.heads + of_q.head];
        }
    float sum[D / 8][4] = {};
    for (int j = begin; j < end; j += kKeys) {
        arrived();
        if (j + kKeys < end) copy_keys(j + kKeys);
        if (!some_seen(seen + warp * 16, j, j + kKeys)) continue;
        const bf16 *k_tile = k_tiles + j / kKeys % 2 * kTile, *v_tile = v_tiles + j / kKeys % 2 * kTile;
        float p[kKeys / 8][4], ds[kKeys / 8][4];
        product_nt<D, kKeys>(p, q_tile + warp * 16 * kStride<D>, k_tile);
        product_nt<D, kKeys>(ds, do_tile + warp * 16 * kStride<D>, v_tile);
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                ds[n][c] = exp2_fast(p[n][c] * (factor * kLog2E) - row_lse[c / 2]) * (ds[n][c] - row_delta[c / 2]);
        where_hidden<kKeys>(seen + warp * 16, j, [&](int n, int c) { ds[n][c] = 0; });
        product_nn<D, kKeys>(sum, ds, k_tile);
    }
    arrived();  // the rows of a block that sees no key
    store_rows<D>(dq, of_q, first, sum, factor, factor);
}

// ---- backward, dk and dv: a block has 16 keys per warp and walks over the queries of its query heads ----------------
// grid: (key tiles, K * parts, batch). Each part has heads_per_block of a key/value head's query heads and its own
// dk and dv (parts, B*Tk, K*D).
template <int D, class Documents, class G>
__global__ void __launch_bounds__(kBackwardThreads, D == 64 ? 3 : 2)
    backward_kv_kernel(G* dk, G* dv, const bf16* dout, const bf16* q, const bf16* k, const bf16* v, const float* lse,
                       const float* delta, AttentionShape s, int heads_per_block, Documents documents) {
    constexpr int kKeys = 16 * kBackwardWarps, kQueries = kBackwardTile, kTile = kQueries * kStride<D>;
    extern __shared__ uint4 memory[];
    bf16 *k_tile = reinterpret_cast<bf16*>(memory), *v_tile = k_tile + kKeys * kStride<D>,
         *q_tiles = v_tile + kKeys * kStride<D>, *do_tiles = q_tiles + 2 * kTile;
    __shared__ float lse_tiles[2][kQueries], delta_tiles[2][kQueries];
    __shared__ Columns seen[kKeys];  // the queries that see each key; none see keys behind the last one
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
    const int block_first = int(blockIdx.x) * kKeys, first = block_first + warp * 16;
    const int first_head = int(blockIdx.y) * heads_per_block;
    const Head of_k = key_head(s, first_head);
    const float factor = rsqrtf(float(D));

    copy_rows<D, kKeys, kBackwardThreads>(k_tile, k, of_k, block_first);
    copy_rows<D, kKeys, kBackwardThreads>(v_tile, v, of_k, block_first);
    if (threadIdx.x < kKeys) {
        const int key = block_first + int(threadIdx.x), queries = int(s.query_len);
        const int64_t q_row = blockIdx.z * s.query_len;
        seen[threadIdx.x] = key < of_k.len ? Columns{int(first_query(s, key)), int(documents.end_query(s, q_row, key))}
                                           : Columns{queries, queries};
    }
    __syncthreads();
    const int begin = seen[0].begin / kQueries * kQueries, end = seen[min(kKeys, of_k.len - block_first) - 1].end;
    const int per_head = (max(end - begin, 0) + kQueries - 1) / kQueries, tiles = per_head * heads_per_block;

    const auto copy_tile = [&](int tile) {
        const int i = begin + tile % per_head * kQueries, place = tile % 2;
        const Head of_q = query_head(s, first_head + tile / per_head);
        copy_rows<D, kQueries, kBackwardThreads>(q_tiles + place * kTile, q, of_q, i);
        copy_rows<D, kQueries, kBackwardThreads>(do_tiles + place * kTile, dout, of_q, i);
        if (threadIdx.x < kQueries) {
            const int query = i + int(threadIdx.x);
            const int64_t at = of_q.row(query) * s.heads + of_q.head;
            copy_float(&lse_tiles[place][threadIdx.x], lse + at, query < of_q.len);
            copy_float(&delta_tiles[place][threadIdx.x], delta + at, query < of_q.len);
        }
    };
    if (tiles > 0) copy_tile(0);
    float sum_k[D / 8][4] = {}, sum_v[D / 8][4] = {};
    for (int tile = 0; tile < tiles; ++tile) {
        const int i = begin + tile % per_head * kQueries, place = tile % 2;
        const bf16 *q_tile = q_tiles + place * kTile, *do_tile = do_tiles + place * kTile;
        arrived();
        if (tile + 1 < tiles) copy_tile(tile + 1);
        if (!some_seen(seen + warp * 16, i, i + kQueries)) continue;
        float p[kQueries / 8][4], ds[kQueries / 8][4];  // transposed: (keys, queries)
        product_nt<D, kQueries>(p, k_tile + warp * 16 * kStride<D>, q_tile);
        product_nt<D, kQueries>(ds, v_tile + warp * 16 * kStride<D>, do_tile);
#pragma unroll
        for (int n = 0; n < kQueries / 8; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int column = 8 * n + 2 * t + c % 2;
                p[n][c] = exp2_fast(p[n][c] * (factor * kLog2E) - lse_tiles[place][column] * kLog2E);
                ds[n][c] = p[n][c] * (ds[n][c] - delta_tiles[place][column]);
            }
        where_hidden<kQueries>(seen + warp * 16, i, [&](int n, int c) { p[n][c] = ds[n][c] = 0; });
        product_nn<D, kQueries>(sum_v, p, do_tile);
        product_nn<D, kQueries>(sum_k, ds, q_tile);
    }
    arrived();  // the rows of a block that no query sees
    const int64_t part = blockIdx.y % (gridDim.y / s.kv_heads) * s.batch * s.key_len * s.kv_heads * D;
    store_rows<D>(dk + part, of_k, first, sum_k, factor, factor);
    store_rows<D>(dv + part, of_k, first, sum_v, 1, 1);
}

// sum (n) = the sum of parts (count, n), in their order.
template <class G>
__global__ void sum_parts_kernel(G* sum, const float* parts, int64_t n, int count) {
    const int64_t i = first_element();
    float total[kPack] = {}, part[kPack];
    for (int p = 0; p < count; ++p) {
        load(part, parts + p * n, i, n);
#pragma unroll
        for (int j = 0; j < kPack; ++j) total[j] += part[j];
    }
    store(sum, i, n, total);
}

// In how many parts the query heads of a key/value head go to different blocks: as few as fill the GPU, 1 if there are
// enough keys. Not asked of the device: sums have the same order on all.
int64_t parts_of(const AttentionShape& s) {
    const int64_t group = s.heads / s.kv_heads, enough = 2 * 132;  // two blocks on each SM of an H100 or H200
    const int64_t blocks = blocks_for(s.key_len, 16 * kBackwardWarps) * s.kv_heads * s.batch;
    for (int64_t parts = 1; parts < group; ++parts)
        if (group % parts == 0 && parts * blocks >= enough) return parts;
    return group;
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
    check_aligned({out, q, k, v});
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
    check_aligned({dq, dk, dv, dout, q, k, v});
    const auto run = [&](auto dim, auto grad_zero, auto mask) {
        using G = decltype(grad_zero);
        using Documents = decltype(mask);
        constexpr int D = decltype(dim)::value, kOwnRows = 16 * kBackwardWarps;
        const size_t bytes = 2 * (kOwnRows + 2 * kBackwardTile) * kStride<D> * sizeof(bf16);
        const int64_t parts = parts_of(s), n = dk.size();
        const dim3 query_blocks(blocks_for(s.query_len, kOwnRows), unsigned(s.heads), unsigned(s.batch));
        const dim3 key_blocks(blocks_for(s.key_len, kOwnRows), unsigned(s.kv_heads * parts), unsigned(s.batch));
        launch(backward_q_kernel<D, Documents, G>, {query_blocks, kBackwardThreads, bytes}, dq.data<G>(),
               dout.data<bf16>(), q.data<bf16>(), k.data<bf16>(), v.data<bf16>(), lse.data<float>(),
               delta.data<float>(), s, mask);
        const auto keys_to = [&](auto* dk_to, auto* dv_to) {
            launch(backward_kv_kernel<D, Documents, std::remove_pointer_t<decltype(dk_to)>>,
                   {key_blocks, kBackwardThreads, bytes}, dk_to, dv_to, dout.data<bf16>(), q.data<bf16>(),
                   k.data<bf16>(), v.data<bf16>(), lse.data<float>(), delta.data<float>(), s,
                   int(s.heads / s.kv_heads / parts), mask);
        };
        if (parts == 1) return keys_to(dk.data<G>(), dv.data<G>());
        Tensor partial({2, parts, n}, DType::f32, Device::cuda, Memory::workspace);
        float *dk_parts = partial.data<float>(), *dv_parts = dk_parts + parts * n;
        keys_to(dk_parts, dv_parts);
        launch(sum_parts_kernel<G>, {blocks_for(n)}, dk.data<G>(), dk_parts, n, int(parts));
        launch(sum_parts_kernel<G>, {blocks_for(n)}, dv.data<G>(), dv_parts, n, int(parts));
    };
    with_head_dim(s.head_dim, [&](auto dim) {
        with_float(dq.dtype(),
                   [&](auto grad_zero) { with_documents(documents, [&](auto mask) { run(dim, grad_zero, mask); }); });
    });
}

}  // namespace train70b::cuda
