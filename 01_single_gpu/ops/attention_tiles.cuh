#pragma once
// Tiles of bf16 in shared memory and what a warp does with them on tensor cores (mma.sync m16n8k16, fp32 sums).
//
//   copy_rows    rows of one head to a tile, in flight until arrived()
//   product_nt   C (16 M, N)  = A (16 M, D) B (N, D)^T     scores: S = Q K^T,  dP = dO V^T
//   product_nn   C (16 M, D) += P (16 M, N) B (N, D)       sums:   O += P V,  dQ += dS K,  dV += P^T dO,  dK += dS^T Q
//   store_rows   C (16 M, D) to rows of one head
// What one ldmatrix brings of B takes 4 clocks of shared memory, in which the SM's tensor cores could do four products
// (16 x 8), and serves 2 M of them. So a warp has M = 2 tiles of 16 rows where the registers suffice (docs/sass.md).
//
// P is the result of the first kind of product and the left side of the second without leaving the registers: the
// layout of an accumulator is that of a left operand (Dao 2023, section 3). Rows lie D + 8 elements apart, so that the
// eight rows which one ldmatrix reads fall into different banks.
//
// Layout of a product c, per thread with g = lane / 4 and t = lane % 4: of rows 8 r + g, r < 2 M, columns 8 n + 2 t and
// + 1 in c[r / 2][n][r % 2 * 2] and behind it.
#include "01_single_gpu/core/cuda.cuh"

namespace train70b::cuda {

using bf16 = __nv_bfloat16;

template <int D>
constexpr int kStride = D + 8;  // elements from one row in shared memory to the next

// The rows of a tensor (B*len, heads*D) that a block works on: one head of the sequence blockIdx.z.
struct Head {
    int len, heads, head;
    __device__ int row(int i) const { return int(blockIdx.z) * len + i; }
    __device__ int64_t offset(int i, int D) const { return (int64_t(row(i)) * heads + head) * D; }
};

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// ---- from global to shared memory, without registers between ----

// 16 bytes; zeros if not `exists`, and then nothing is read. The thread works on until arrived(): that is what hides
// the latency of memory.
__device__ inline void copy_16_bytes(bf16* to, const bf16* from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(exists ? 16 : 0)
                 : "memory");
}
__device__ inline void copy_float(float* to, const float* from, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(exists ? 4 : 0)
                 : "memory");
}

// All copies that the block has issued are there, and all its warps are done with what they did before.
__device__ inline void arrived() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
}

// Rows [begin, begin + Rows) of a head of x into a tile, by all threads of the block; rows from head.len on become
// zeros.
template <int D, int Rows, int Threads>
__device__ void copy_rows(bf16* tile, const bf16* x, const Head& head, int begin) {
    constexpr int kPerRow = D / 8;  // 16-byte pieces
    const int r = threadIdx.x / kPerRow, d = threadIdx.x % kPerRow * 8;
    const int64_t width = int64_t(head.heads) * D;
    const bf16* from = x + head.offset(0, D) + (begin + r) * width + d;
    bf16* to = tile + r * kStride<D> + d;
#pragma unroll
    for (int i = 0; i < Rows; i += Threads / kPerRow)
        copy_16_bytes(to + i * kStride<D>, from + i * width, begin + r + i < head.len);
}

// ---- products ----

// What one ldmatrix brings: four 8 x 8 matrices, in a register each; every lane gives the address of one row.
struct Fragment {
    uint32_t r[4];
};
__device__ inline Fragment load_matrices(const bf16* p) {
    Fragment f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.r[0]), "=r"(f.r[1]), "=r"(f.r[2]), "=r"(f.r[3])
                 : "r"(shared_address(p)));
    return f;
}
__device__ inline Fragment load_matrices_transposed(const bf16* p) {
    Fragment f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.r[0]), "=r"(f.r[1]), "=r"(f.r[2]), "=r"(f.r[3])
                 : "r"(shared_address(p)));
    return f;
}

// c += a (16, 16) b (16, 8)
__device__ inline void mma(float (&c)[4], const Fragment& a, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1));
}

__device__ inline uint32_t pack(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
}

// Left operands (16, 16) of a product, for product_nt and product_nn: of the m-th 16 rows, columns [k, k + 16).
template <int D>
__device__ auto left_rows(const bf16* rows) {  // of a tile, from `rows` on
    return [=](int m, int k) {
        const int lane = threadIdx.x % 32;
        return load_matrices(rows + (16 * m + lane % 16) * kStride<D> + k + lane / 16 * 8);
    };
}
__device__ inline Fragment rounded(const float (&first)[4], const float (&second)[4]) {  // of 8 columns each
    return {pack(first[0], first[1]), pack(first[2], first[3]), pack(second[0], second[1]), pack(second[2], second[3])};
}
template <class P>
__device__ auto left_rounded(const P& p) {  // of a product, in registers
    return [&](int m, int k) { return rounded(p[m][k / 8], p[m][k / 8 + 1]); };
}

// c[m] (16, N) = a (16, D) b (N, D)^T, b in shared memory.
template <int D, int N, int M, class Left>
__device__ void product_nt(float (&c)[M][N / 8][4], Left&& a, const bf16* b) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N / 8; ++n) c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0;
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        Fragment left[M];
#pragma unroll
        for (int m = 0; m < M; ++m) left[m] = a(m, k);
#pragma unroll
        for (int n = 0; n < N; n += 16) {
            const Fragment right =
                load_matrices(b + (n + lane / 16 * 8 + lane % 8) * kStride<D> + k + lane / 8 % 2 * 8);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                mma(c[m][n / 8], left[m], right.r[0], right.r[1]);
                mma(c[m][n / 8 + 1], left[m], right.r[2], right.r[3]);
            }
        }
    }
}

// c[m] (16, D) += p (16, N) b (N, D), b in shared memory.
template <int D, int N, int M, class Left>
__device__ void product_nn(float (&c)[M][D / 8][4], Left&& p, const bf16* b) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < N; k += 16) {
        Fragment left[M];
#pragma unroll
        for (int m = 0; m < M; ++m) left[m] = p(m, k);
#pragma unroll
        for (int n = 0; n < D; n += 16) {
            const Fragment right =
                load_matrices_transposed(b + (k + lane / 8 % 2 * 8 + lane % 8) * kStride<D> + n + lane / 16 * 8);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                mma(c[m][n / 8], left[m], right.r[0], right.r[1]);
                mma(c[m][n / 8 + 1], left[m], right.r[2], right.r[3]);
            }
        }
    }
}

// A warp's sums, rows 8 r + g times factor(r), to rows from `row` on of a head of x: two neighbours at a time.
template <int D, int M, class G, class Factor>
__device__ void store_rows(G* x, const Head& head, int row, const float (&c)[M][D / 8][4], Factor&& factor) {
    struct alignas(2 * sizeof(G)) Pair {
        G first, second;
    };
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) {
        const int i = row + 8 * r + g;
        if (i >= head.len) continue;
        G* p = x + head.offset(i, D) + 2 * t;
#pragma unroll
        for (int n = 0; n < D / 8; ++n) {
            const float(&pair)[4] = c[r / 2][n];
            *reinterpret_cast<Pair*>(p + 8 * n) = {from_float<G>(pair[r % 2 * 2] * factor(r)),
                                                   from_float<G>(pair[r % 2 * 2 + 1] * factor(r))};
        }
    }
}

// ---- along the rows of a fragment ----

__device__ inline float exp2_fast(float x) {  // one instruction: results below 2^-126 are 0
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float quad_max(float x) {  // over the four threads that share a row
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Columns [begin, end) of a row of scores, which the mask leaves: of a query its keys, of a key its queries. Both grow
// from row to row. The block's lie in shared memory, so that they take no registers where no mask is needed.
struct Columns {
    int begin, end;
};

// Of columns [j, end): whether one of `Rows` rows from `rows` on may see one (true of some tiles, too, that none sees);
// whether all rows see all.
template <int Rows>
__device__ bool some_seen(const Columns* rows, int j, int end) {
    return j < rows[Rows - 1].end && end > rows[0].begin;
}
template <int Rows>
__device__ bool all_seen(const Columns* rows, int j, int end) {
    return j >= rows[Rows - 1].begin && end <= rows[0].end;
}

// Calls hide(m, n, c) for the scores c[m][n][c] of columns [j, j + N) that their rows do not see: none in most tiles,
// in which no index is compared.
template <int M, int N, class Hide>
__device__ void where_hidden(const Columns* rows, int j, Hide&& hide) {
    if (all_seen<16 * M>(rows, j, j + N)) return;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2 * M; ++r) {
        const auto [begin, end] = rows[8 * r + g];
        const int from_begin = j + 2 * t - begin, count = max(end - begin, 0);
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c)  // also where it is below 0
                if (unsigned(from_begin + 8 * n + c) >= unsigned(count)) hide(r / 2, n, r % 2 * 2 + c);
    }
}

}  // namespace train70b::cuda
