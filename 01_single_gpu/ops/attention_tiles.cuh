#pragma once
// Tiles of bf16 in shared memory and what a warp does with them on tensor cores (mma.sync m16n8k16, fp32 sums).
//
//   copy_rows    rows of one head to a tile, in flight until arrived()
//   product_nt   C (16, N)  = A (16, D) B (N, D)^T       scores: S = Q K^T,  dP = dO V^T
//   product_nn   C (16, D) += P (16, N) B (N, D)         sums:   O += P V,  dQ += dS K,  dV += P^T dO,  dK += dS^T Q
//   store_rows   C (16, D) to rows of one head
// P is the result of the first kind of product and the left side of the second without leaving the registers: the
// layout of an accumulator is that of a left operand (Dao 2023, section 3). Rows lie D + 8 elements apart, so that the
// eight rows which one ldmatrix reads fall into different banks.
//
// Layout of a C fragment, per thread with g = lane / 4 and t = lane % 4: rows g and g + 8, columns 8 n + 2 t and + 1:
//   c[n][0], c[n][1] in row g;  c[n][2], c[n][3] in row g + 8.
#include "01_single_gpu/core/cuda.cuh"

namespace train70b::cuda {

using bf16 = __nv_bfloat16;

template <int D>
constexpr int kStride = D + 8;  // elements from one row in shared memory to the next

// The rows of a tensor (B*len, heads*D) that a block works on: one head of the sequence blockIdx.z.
struct Head {
    int len, heads, head;
    __device__ int64_t row(int i) const { return blockIdx.z * int64_t(len) + i; }
    __device__ int64_t offset(int D) const { return (row(0) * heads + head) * D; }  // of the head in row 0
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
    const bf16* from = x + head.offset(D) + (begin + r) * width + d;
    bf16* to = tile + r * kStride<D> + d;
#pragma unroll
    for (int i = 0; i < Rows; i += Threads / kPerRow)
        copy_16_bytes(to + i * kStride<D>, from + i * width, begin + r + i < head.len);
}

// ---- products ----

__device__ inline void load_matrices(uint32_t (&r)[4],
                                     const bf16* p) {  // four 8 x 8 matrices, one row address per lane
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p)));
}

__device__ inline void load_matrices_transposed(uint32_t (&r)[4], const bf16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p)));
}

__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                           uint32_t b1) {  // c += a (16, 16) b (16, 8)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline uint32_t pack(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
}

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

// A warp's (16, D) sums, each row times a factor, to rows [row, row + 16) of a head of x: two neighbours at a time.
template <int D, class G>
__device__ void store_rows(G* x, const Head& head, int row, const float (&c)[D / 8][4], float factor_g,
                           float factor_g8) {
    struct alignas(2 * sizeof(G)) Pair {
        G first, second;
    };
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = row + g + 8 * half;
        const float factor = half ? factor_g8 : factor_g;
        if (r >= head.len) continue;
        G* p = x + head.offset(D) + int64_t(r) * head.heads * D + 2 * t;
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
            *reinterpret_cast<Pair*>(p + 8 * n) = {from_float<G>(c[n][2 * half] * factor),
                                                   from_float<G>(c[n][2 * half + 1] * factor)};
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

// Of columns [j, end): whether one of a warp's 16 rows may see one (true of some tiles, too,
// that none sees); whether all rows see all. `rows`: those of the warp.
__device__ inline bool some_seen(const Columns* rows, int j, int end) {
    return j < rows[15].end && end > rows[0].begin;
}
__device__ inline bool all_seen(const Columns* rows, int j, int end) {
    return j >= rows[15].begin && end <= rows[0].end;
}

// Calls hide(n, c) for the scores c[n][c] of columns [j, j + N) that their rows do not see: none in most tiles, in
// which no index is compared.
template <int N, class Hide>
__device__ void where_hidden(const Columns* rows, int j, Hide&& hide) {
    if (all_seen(rows, j, j + N)) return;
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const auto [begin, end] = rows[g + 8 * half];
        const int from_begin = j + 2 * t - begin, count = max(end - begin, 0);
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c)  // also where it is below 0
                if (unsigned(from_begin + 8 * n + c) >= unsigned(count)) hide(n, 2 * half + c);
    }
}

}  // namespace train70b::cuda
