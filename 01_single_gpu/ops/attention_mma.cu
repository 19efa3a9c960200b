// Attention on tensor cores: bf16 products, fp32 sums, head sizes 64 and 128 (attention_tiles.cuh has the products).
//
// grid: (heads, tiles, batch). Blocks start in the order of x: under the causal mask those with most work first, of all
// heads, so that the shortest come last and no SM is left with a long one.
// In all three kernels a warp owns 16 or 32 rows and the block walks over tiles of other rows. While a tile is
// multiplied the next one is in flight, so that no warp waits for memory in every tile: arrived() stands before the
// first use of a tile, and right behind it begins the copy into the place that everybody has just left.
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

// ---- forward: a block has 32 queries per warp and walks over the keys -----------------------------------------------
constexpr int kForwardWarps = 4, kForwardKeys = 64;

template <int D, class Documents>
__global__ void __launch_bounds__(32 * kForwardWarps, D == 64 ? 3 : 2)
    forward_kernel(bf16* out, float* lse, const bf16* q, const bf16* k, const bf16* v, AttentionShape s,
                   Documents documents) {
    constexpr int kThreads = 32 * kForwardWarps, kQueries = 32 * kForwardWarps, kKeys = kForwardKeys;
    extern __shared__ uint4 memory[];
    bf16 *q_tile = reinterpret_cast<bf16*>(memory), *k_tile = q_tile + kQueries * kStride<D>,
         *v_tile = k_tile + kKeys * kStride<D>;
    const int row = threadIdx.x / 32 * 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;  // row: the warp's first
    const int block_first = int(gridDim.y - 1 - blockIdx.y) * kQueries;
    const Head of_q = query_head(s, int(blockIdx.x)), of_k = key_head(s, of_q.head);

    copy_rows<D, kQueries, kThreads>(q_tile, q, of_q, block_first);
    __shared__ Columns seen[kQueries];
    __shared__ Head of_out;  // as of_q, but in no register during the loop
    if (threadIdx.x == 0) of_out = of_q;
    find_seen(seen, documents, s, block_first);
    const int begin = seen[0].begin / kKeys * kKeys, end = seen[min(kQueries, of_q.len - block_first) - 1].end;
    const float factor = rsqrtf(float(D)) * kLog2E;  // scores in powers of two: exp2 is the hardware's exponential
    const auto queries = left_rows<D>(q_tile + row * kStride<D>);
    if (begin < end) copy_rows<D, kKeys, kThreads>(k_tile, k, of_k, begin);

    float sum[2][D / 8][4] = {};  // (32, D)
    // Of rows 8 r + g: the greatest score in powers of two (finite, but below all, where none has been seen), and the
    // sum of this thread's probabilities.
    float row_max[4] = {-3e38f, -3e38f, -3e38f, -3e38f}, row_sum[4] = {};
    for (int j = begin; j < end; j += kKeys) {
        float p[2][kKeys / 8][4];
        const bool sees = some_seen<32>(seen + row, j, j + kKeys);
        arrived();  // these keys
        copy_rows<D, kKeys, kThreads>(v_tile, v, of_k, j);
        if (sees) product_nt<D, kKeys>(p, queries, k_tile);
        arrived();  // their values
        if (j + kKeys < end) copy_rows<D, kKeys, kThreads>(k_tile, k, of_k, j + kKeys);
        if (!sees) continue;
        where_hidden<2, kKeys>(seen + row, j, [&](int m, int n, int c) { p[m][n][c] = -INFINITY; });
        float max[4];
        bool grown = false;
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            float greatest = -INFINITY;
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n)
                greatest = fmaxf(greatest, fmaxf(p[r / 2][n][r % 2 * 2], p[r / 2][n][r % 2 * 2 + 1]));
            greatest = quad_max(greatest) * factor;
            // A maximum that is a little too small serves as well: probabilities, before the division, reach 2^8.
            max[r] = greatest > row_max[r] + 8 ? greatest : row_max[r];
            grown |= max[r] != row_max[r];
        }
        if (grown)  // rarely after the first tile
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const float shrink = exp2_fast(row_max[r] - max[r]);
                row_max[r] = max[r];
                row_sum[r] *= shrink;
#pragma unroll
                for (int n = 0; n < D / 8; ++n)
                    for (int c = 0; c < 2; ++c) sum[r / 2][n][r % 2 * 2 + c] *= shrink;
            }
        const auto probabilities = [&](int m, int key) {  // computed while the products before are on their way
#pragma unroll
            for (int n = key / 8; n < key / 8 + 2; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    row_sum[2 * m + c / 2] += p[m][n][c] = exp2_fast(p[m][n][c] * factor - row_max[2 * m + c / 2]);
            return rounded(p[m][key / 8], p[m][key / 8 + 1]);
        };
        product_nn<D, kKeys>(sum, probabilities, v_tile);
    }
    arrived();  // the queries of a block that sees no key
    float normalise[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const float total = quad_sum(row_sum[r]);
        const int query = block_first + row + 8 * r + g;
        const bool blind = total == 0;  // it sees no key
        normalise[r] = blind ? 0.0f : 1.0f / total;
        if (t == 0 && query < of_out.len)
            lse[of_out.row(query) * s.heads + of_out.head] =
                blind ? -INFINITY : row_max[r] * (1 / kLog2E) + logf(total);
    }
    store_rows<D>(out, of_out, block_first + row, sum, [&](int r) { return normalise[r]; });
}

// ---- backward, dq: a block has 32 queries per warp and walks over the keys ------------------------------------------
constexpr int kBackwardWarps = 4, kBackwardKeys = 32, kBackwardQueries = 64, kBackwardThreads = 32 * kBackwardWarps;

template <int D, class Documents, class G>
__global__ void __launch_bounds__(kBackwardThreads, D == 64 ? 3 : 2)
    backward_q_kernel(G* dq, const bf16* dout, const bf16* q, const bf16* k, const bf16* v, const float* lse,
                      const float* delta, AttentionShape s, Documents documents) {
    constexpr int kQueries = 32 * kBackwardWarps, kKeys = kBackwardKeys;
    extern __shared__ uint4 memory[];
    bf16 *q_tile = reinterpret_cast<bf16*>(memory), *do_tile = q_tile + kQueries * kStride<D>,
         *k_tile = do_tile + kQueries * kStride<D>, *v_tile = k_tile + kKeys * kStride<D>;
    const int row = threadIdx.x / 32 * 32, g = threadIdx.x % 32 / 4;
    const int block_first = int(gridDim.y - 1 - blockIdx.y) * kQueries, first = block_first + row;
    const Head of_q = query_head(s, int(blockIdx.x)), of_k = key_head(s, of_q.head);
    copy_rows<D, kQueries, kBackwardThreads>(q_tile, q, of_q, block_first);
    copy_rows<D, kQueries, kBackwardThreads>(do_tile, dout, of_q, block_first);
    __shared__ Columns seen[kQueries];
    find_seen(seen, documents, s, block_first);
    const int begin = seen[0].begin / kKeys * kKeys, end = seen[min(kQueries, of_q.len - block_first) - 1].end;
    const float factor = rsqrtf(float(D));
    const auto queries = left_rows<D>(q_tile + row * kStride<D>), gradients = left_rows<D>(do_tile + row * kStride<D>);

    if (begin < end) copy_rows<D, kKeys, kBackwardThreads>(v_tile, v, of_k, begin);
    float row_lse[4] = {}, row_delta[4] = {};
#pragma unroll
    for (int r = 0; r < 4; ++r)
        if (const int query = first + 8 * r + g; query < of_q.len) {
            row_lse[r] = lse[of_q.row(query) * s.heads + of_q.head] * kLog2E;
            row_delta[r] = delta[of_q.row(query) * s.heads + of_q.head];
        }
    float sum[2][D / 8][4] = {};
    for (int j = begin; j < end; j += kKeys) {
        float p[2][kKeys / 8][4], ds[2][kKeys / 8][4];
        const bool sees = some_seen<32>(seen + row, j, j + kKeys);
        arrived();  // these values
        copy_rows<D, kKeys, kBackwardThreads>(k_tile, k, of_k, j);
        if (sees) product_nt<D, kKeys>(ds, gradients, v_tile);
        arrived();  // their keys
        if (j + kKeys < end) copy_rows<D, kKeys, kBackwardThreads>(v_tile, v, of_k, j + kKeys);
        if (!sees) continue;
        product_nt<D, kKeys>(p, queries, k_tile);
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    ds[m][n][c] = exp2_fast(p[m][n][c] * (factor * kLog2E) - row_lse[2 * m + c / 2]) *
                                  (ds[m][n][c] - row_delta[2 * m + c / 2]);
        where_hidden<2, kKeys>(seen + row, j, [&](int m, int n, int c) { ds[m][n][c] = 0; });
        product_nn<D, kKeys>(sum, left_rounded(ds), k_tile);
    }
    arrived();  // the rows of a block that sees no key
    store_rows<D>(dq, of_q, first, sum, [&](int) { return factor; });
}

// ---- backward, dk and dv: a block has 16 keys per warp and walks over the queries of its query heads ----------------
// There are two places for a tile: one is read while the next tile is on its way to the other. Sums of 32 rows would
// not fit into the registers; instead the warp's own keys and values stay there, so that no tile loads them again.
// grid: (K * parts, key tiles, batch). Each part has heads_per_block of a key/value head's query heads and its own
// dk and dv (parts, B*Tk, K*D).
template <int D, class Documents, class G>
__global__ void __launch_bounds__(kBackwardThreads, D == 64 ? 3 : 2)
    backward_kv_kernel(G* dk, G* dv, const bf16* dout, const bf16* q, const bf16* k, const bf16* v, const float* lse,
                       const float* delta, AttentionShape s, int heads_per_block, Documents documents) {
    constexpr int kKeys = 16 * kBackwardWarps, kQueries = kBackwardQueries, kTile = kQueries * kStride<D>;
    constexpr int kStep = 32;              // queries that are multiplied at a time
    static_assert(kKeys <= 2 * kQueries);  // at first the places of queries hold the block's keys
    extern __shared__ uint4 memory[];
    bf16 *q_tiles = reinterpret_cast<bf16*>(memory), *do_tiles = q_tiles + 2 * kTile;
    __shared__ float lse_tiles[2][kQueries], delta_tiles[2][kQueries];
    __shared__ Columns seen[kKeys];  // the queries that see each key; none see keys behind the last one
    __shared__ Head of_out;          // as of_k, but in no register during the loop
    const int warp = threadIdx.x / 32, t = threadIdx.x % 4;
    const int block_first = int(blockIdx.y) * kKeys, first = block_first + warp * 16;
    const Head of_k = key_head(s, int(blockIdx.x) * heads_per_block);
    const float factor = rsqrtf(float(D));

    if (threadIdx.x == 0) of_out = of_k;
    copy_rows<D, kKeys, kBackwardThreads>(q_tiles, k, of_k, block_first);
    copy_rows<D, kKeys, kBackwardThreads>(do_tiles, v, of_k, block_first);
    if (threadIdx.x < kKeys) {
        const int key = block_first + int(threadIdx.x), queries = int(s.query_len);
        const int64_t q_row = blockIdx.z * s.query_len;
        seen[threadIdx.x] = key < of_k.len ? Columns{int(first_query(s, key)), int(documents.end_query(s, q_row, key))}
                                           : Columns{queries, queries};
    }
    arrived();
    const auto keys = left_rows<D>(q_tiles + warp * 16 * kStride<D>),
               values = left_rows<D>(do_tiles + warp * 16 * kStride<D>);
    Fragment own_k[D / 16], own_v[D / 16];
#pragma unroll
    for (int d = 0; d < D; d += 16) {
        own_k[d / 16] = keys(0, d);
        own_v[d / 16] = values(0, d);
    }
    __syncthreads();
    const int begin = seen[0].begin / kQueries * kQueries, end = seen[min(kKeys, of_k.len - block_first) - 1].end;
    const auto copy_tile = [&](int head, int i, int place) {
        const Head of_q = query_head(s, int(blockIdx.x) * heads_per_block + head);
        copy_rows<D, kQueries, kBackwardThreads>(q_tiles + place * kTile, q, of_q, i);
        copy_rows<D, kQueries, kBackwardThreads>(do_tiles + place * kTile, dout, of_q, i);
        if (threadIdx.x < kQueries) {
            const int query = i + int(threadIdx.x);
            const int64_t at = of_q.row(query) * s.heads + of_q.head;
            copy_float(&lse_tiles[place][threadIdx.x], lse + at, query < of_q.len);
            copy_float(&delta_tiles[place][threadIdx.x], delta + at, query < of_q.len);
        }
    };
    if (begin < end) copy_tile(0, begin, 0);
    const auto left_k = [&](int, int d) { return own_k[d / 16]; };
    const auto left_v = [&](int, int d) { return own_v[d / 16]; };
    float sum_k[1][D / 8][4] = {}, sum_v[1][D / 8][4] = {};
    int place = 0;
    for (int head = 0; head < heads_per_block; ++head)
        for (int i = begin; i < end; i += kQueries, place ^= 1) {
            const bool last = i + kQueries >= end;  // of this head
            arrived();
            if (head + last < heads_per_block) copy_tile(head + last, last ? begin : i + kQueries, place ^ 1);
#pragma unroll 1
            for (int step = 0; step < kQueries; step += kStep) {
                if (!some_seen<16>(seen + warp * 16, i + step, i + step + kStep)) continue;
                const bf16 *q_tile = q_tiles + place * kTile + step * kStride<D>, *do_tile = q_tile + 2 * kTile;
                float p[1][kStep / 8][4], ds[1][kStep / 8][4];  // transposed: (keys, queries)
                product_nt<D, kStep>(p, left_k, q_tile);
                product_nt<D, kStep>(ds, left_v, do_tile);
#pragma unroll
                for (int n = 0; n < kStep / 8; ++n)
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        const int column = step + 8 * n + 2 * t + c % 2;
                        p[0][n][c] = exp2_fast(p[0][n][c] * (factor * kLog2E) - lse_tiles[place][column] * kLog2E);
                        ds[0][n][c] = p[0][n][c] * (ds[0][n][c] - delta_tiles[place][column]);
                    }
                where_hidden<1, kStep>(seen + warp * 16, i + step,
                                       [&](int, int n, int c) { p[0][n][c] = ds[0][n][c] = 0; });
                product_nn<D, kStep>(sum_v, left_rounded(p), do_tile);
                product_nn<D, kStep>(sum_k, left_rounded(ds), q_tile);
            }
        }
    const int64_t part = blockIdx.x % (gridDim.x / s.kv_heads) * s.batch * s.key_len * s.kv_heads * D;
    store_rows<D>(dk + part, of_out, first, sum_k, [&](int) { return factor; });
    store_rows<D>(dv + part, of_out, first, sum_v, [](int) { return 1.0f; });
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
            constexpr int D = decltype(dim)::value, kQueries = 32 * kForwardWarps;
            const size_t bytes = (kQueries + 2 * kForwardKeys) * kStride<D> * sizeof(bf16);
            const dim3 blocks(unsigned(s.heads), blocks_for(s.query_len, kQueries), unsigned(s.batch));
            launch(forward_kernel<D, decltype(mask)>, {blocks, 32 * kForwardWarps, bytes}, out, lse, q, k, v, s, mask);
        });
    });
}

void mma_attention_backward(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q, const Tensor& k,
                            const Tensor& v, const Tensor& lse, const Tensor& delta, const AttentionShape& s,
                            const DocumentStarts& documents) {
    check_aligned({dq, dk, dv, dout, q, k, v});
    const auto run = [&]<int D, class G, class Documents>(std::integral_constant<int, D>, G, Documents mask) {
        constexpr int kQueries = 32 * kBackwardWarps, kKeys = 16 * kBackwardWarps;
        const size_t row = kStride<D> * sizeof(bf16), q_bytes = 2 * (kQueries + kBackwardKeys) * row,
                     kv_bytes = 4 * kBackwardQueries * row;
        const int64_t parts = parts_of(s), n = dk.size();
        const dim3 query_blocks(unsigned(s.heads), blocks_for(s.query_len, kQueries), unsigned(s.batch));
        const dim3 key_blocks(unsigned(s.kv_heads * parts), blocks_for(s.key_len, kKeys), unsigned(s.batch));
        launch(backward_q_kernel<D, Documents, G>, {query_blocks, kBackwardThreads, q_bytes}, dq, dout, q, k, v, lse,
               delta, s, mask);
        const auto keys_to = [&](auto* dk_to, auto* dv_to) {
            launch(backward_kv_kernel<D, Documents, std::remove_pointer_t<decltype(dk_to)>>,
                   {key_blocks, kBackwardThreads, kv_bytes}, dk_to, dv_to, dout, q, k, v, lse, delta, s,
                   int(s.heads / s.kv_heads / parts), mask);
        };
        if (parts == 1) return keys_to(dk.data<G>(), dv.data<G>());
        Tensor partial({2, parts, n}, DType::f32, Device::cuda, Memory::workspace);
        float *dk_parts = partial.data<float>(), *dv_parts = dk_parts + parts * n;
        keys_to(dk_parts, dv_parts);
        launch(sum_parts_kernel<G>, {blocks_for(n)}, dk, dk_parts, n, int(parts));
        launch(sum_parts_kernel<G>, {blocks_for(n)}, dv, dv_parts, n, int(parts));
    };
    with_head_dim(s.head_dim, [&](auto dim) {
        with_float(dq.dtype(),
                   [&](auto grad_zero) { with_documents(documents, [&](auto mask) { run(dim, grad_zero, mask); }); });
    });
}

}  // namespace train70b::cuda
