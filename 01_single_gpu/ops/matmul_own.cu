// A matrix product by hand in four steps (--matmul), beside cuBLASLt's in matmul.cu. Each has one idea more; what it
// saves is counted in 01_single_gpu/REFERENCE.md:
//   naive       a thread computes one element of c and reads all that it needs from global memory
//   tiled       a block brings tiles of the operands to shared memory, where all its threads read them
//   registers   a thread computes 8 x 8 elements: a number that it has read serves eight products
//   mma         tensor cores: a warp computes 64 x 32, while the block's next tiles are on their way
// Sums run over ascending k (mma: 16 at a time), in fp32, and are rounded once: the first three give the same bits.
#include "01_single_gpu/ops/attention_tiles.cuh"
#include "01_single_gpu/ops/matmul_own.h"

namespace train70b::cuda {
namespace {

// op(a) or op(b). Elements have two indices: k, along which products are summed, and o, the row or column of c.
template <class T>
struct Operand {
    const T* p;
    int64_t outer, depth;  // o < outer, k < depth
    bool along_k;          // neighbours in memory are neighbours in k, else in o
    bool in_packs;         // every 8 of them are aligned to 16 bytes, and there is no remainder

    __device__ float at(int64_t o, int64_t k) const {  // 0 outside
        return o < outer && k < depth ? to_float(p[along_k ? o * depth + k : k * outer + o]) : 0;
    }
    // Where an element lies, and how many it and its neighbours behind it in memory are (0 or less: it is outside).
    __device__ std::pair<const T*, int64_t> line_from(int64_t o, int64_t k) const {
        const int64_t line = along_k ? o : k, begin = along_k ? k : o, length = along_k ? depth : outer;
        return {p + line * length + begin, line < (along_k ? outer : depth) ? length - begin : 0};
    }
};

template <class C>
struct Result {
    C* p;
    int64_t rows, cols;
    float beta;
    __device__ void put(int64_t row, int64_t col, float sum) const {
        if (row >= rows || col >= cols) return;
        C& c = p[row * cols + col];
        c = from_float<C>(beta == 0 ? sum : sum + beta * to_float(c));  // with 0, c may be NaN
    }
};

// ---- naive: two loads from global memory for each product ----
constexpr int kSide = 32;

template <class T, class C>
__global__ void naive_kernel(Result<C> c, Operand<T> a, Operand<T> b) {
    const int64_t row = int64_t(blockIdx.x) * (kThreads / kSide) + threadIdx.x / kSide;
    const int64_t col = int64_t(blockIdx.y) * kSide + threadIdx.x % kSide;
    float sum = 0;
    for (int64_t k = 0; k < a.depth; ++k) sum += a.at(row, k) * b.at(col, k);
    c.put(row, col, sum);
}

// ---- tiled: two loads from shared memory for each product, 2 / 32 from global memory ----
using SquareTile = float[kSide][kSide + 1];  // 33 places in a line: 32 elements in a column lie in 32 banks

template <class T>
__device__ void load_tile(SquareTile& tile, const Operand<T>& x, int64_t o, int64_t k) {
    const int line = threadIdx.x / kSide, lane = threadIdx.x % kSide;  // lanes are neighbours in memory
    const int i = x.along_k ? line : lane, j = x.along_k ? lane : line;
    tile[i][j] = x.at(o + i, k + j);
}

template <class T, class C>
__global__ void __launch_bounds__(kSide* kSide) tiled_kernel(Result<C> c, Operand<T> a, Operand<T> b) {
    __shared__ float a_tile[kSide][kSide + 1], b_tile[kSide][kSide + 1];
    const int row = threadIdx.x / kSide, col = threadIdx.x % kSide;
    const int64_t first_row = int64_t(blockIdx.x) * kSide, first_col = int64_t(blockIdx.y) * kSide;
    float sum = 0;
    for (int64_t k = 0; k < a.depth; k += kSide) {
        load_tile(a_tile, a, first_row, k);
        load_tile(b_tile, b, first_col, k);
        __syncthreads();  // the tiles are there
        for (int j = 0; j < kSide; ++j) sum += a_tile[row][j] * b_tile[col][j];
        __syncthreads();  // everyone is done with them
    }
    c.put(first_row + row, first_col + col, sum);
}

// ---- registers: four loads of 16 bytes from shared memory for 64 products ----
constexpr int kWide = 128, kDeep = 16;  // a block computes kWide x kWide of c

struct alignas(16) Four {
    float value[4];
};
using DeepTile = Four[kDeep][kWide / 4];  // a line has all o of one k

// A thread brings 8 neighbours in memory: of one line of the tile, or one to each of 8 lines.
template <class T>
__device__ void load_tile(DeepTile& tile, const Operand<T>& x, int64_t first, int64_t k) {
    const int t = threadIdx.x, o = x.along_k ? t % kWide : t % kDeep * kPack,
              line = x.along_k ? t / kWide * kPack : t / kDeep;
    const auto [from, left] = x.line_from(first + o, k + line);
    alignas(16) float values[kPack];
    load(values, from, 0, left);
    if (x.along_k)
        for (int i = 0; i < kPack; ++i) tile[line + i][o / 4].value[o % 4] = values[i];
    else
        for (int i = 0; i < 2; ++i) tile[line][o / 4 + i] = reinterpret_cast<const Four*>(values)[i];
}

// A thread has rows 4 row to 4 row + 3 and those 64 further on; columns, too: lanes read neighbours.
template <class T, class C>
__global__ void __launch_bounds__(kThreads, 2) registers_kernel(Result<C> c, Operand<T> a, Operand<T> b) {
    __shared__ Four a_tile[kDeep][kWide / 4], b_tile[kDeep][kWide / 4];
    const int row = threadIdx.x / 16, col = threadIdx.x % 16;
    const int64_t first_row = int64_t(blockIdx.x) * kWide, first_col = int64_t(blockIdx.y) * kWide;
    float sum[8][8] = {};
    for (int64_t k = 0; k < a.depth; k += kDeep) {
        load_tile(a_tile, a, first_row, k);
        load_tile(b_tile, b, first_col, k);
        __syncthreads();
#pragma unroll 4
        for (int j = 0; j < kDeep; ++j) {
            const Four x[2] = {a_tile[j][row], a_tile[j][row + 16]}, y[2] = {b_tile[j][col], b_tile[j][col + 16]};
#pragma unroll
            for (int i = 0; i < 64; ++i) sum[i / 8][i % 8] += x[i / 32].value[i / 8 % 4] * y[i / 4 % 2].value[i % 4];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 64; ++i)
        c.put(first_row + i / 32 * 64 + 4 * row + i / 8 % 4, first_col + i / 4 % 2 * 64 + 4 * col + i % 4,
              sum[i / 8][i % 8]);
}

// ---- mma: 6 ldmatrix for 16 products of 16 x 8 x 16 ----
constexpr int kStep = 32;  // of k, between two barriers

// kWide of o and kStep of k, lying as in global memory, but that the packs of a line change places: so the eight that
// one ldmatrix reads, one below the other, lie in different banks, as do the eight that as many lanes copy.
template <bool along_k>  // as its operand
struct MmaTile {
    static constexpr int kLine = along_k ? kStep : kWide;
    alignas(16) bf16 values[along_k ? kWide : kStep][kLine];

    __device__ bf16* pack(int line, int at) { return &values[line][at ^ (along_k ? line / 2 % 4 : line % 8) * kPack]; }
    __device__ void copy(const Operand<bf16>& x, int64_t o, int64_t k) {  // in flight until arrived()
#pragma unroll
        for (int t = threadIdx.x; t < kWide * kStep / kPack; t += kThreads) {
            const int line = t / (kLine / kPack), at = t % (kLine / kPack) * kPack;
            const auto [from, left] = along_k ? x.line_from(o + line, k + at) : x.line_from(o + at, k + line);
            if (x.in_packs)
                copy_16_bytes(pack(line, at), from, left > 0);
            else
                for (int i = 0; i < kPack; ++i) pack(line, at)[i] = i < left ? from[i] : from_float<bf16>(0);
        }
    }
    __device__ Fragment fragment(int o, int k, bool left) {  // four 8 x 8; left: o first, then k; right: k, then o
        const int lane = threadIdx.x % 32;
        o += lane / (left ? 8 : 16) % 2 * 8;
        k += lane / (left ? 16 : 8) % 2 * 8;
        return along_k ? load_matrices(pack(o + lane % 8, k)) : load_matrices_transposed(pack(k + lane % 8, o));
    }
};

template <class C, class A, class B>
__global__ void __launch_bounds__(kThreads, 2) mma_kernel(Result<C> c, Operand<bf16> a, Operand<bf16> b) {
    __shared__ A a_tiles[2];
    __shared__ B b_tiles[2];
    const int warp = threadIdx.x / 32, row = warp / 4 * 64, col = warp % 4 * 32;
    const int64_t first_row = int64_t(blockIdx.x) * kWide, first_col = int64_t(blockIdx.y) * kWide;
    const auto copy = [&](int64_t to, int64_t k) {
        a_tiles[to].copy(a, first_row, k);
        b_tiles[to].copy(b, first_col, k);
    };
    float sum[4][4][4] = {};
    copy(0, 0);
    for (int64_t k = 0, now = 0; k < a.depth; k += kStep, now ^= 1) {
        arrived();  // these tiles; and everyone is done with those before them
        if (k + kStep < a.depth) copy(now ^ 1, k + kStep);
#pragma unroll
        for (int j = 0; j < kStep; j += 16) {
            Fragment left[4];
            for (int m = 0; m < 4; ++m) left[m] = a_tiles[now].fragment(row + 16 * m, j, true);
            for (int n = 0; n < 4; n += 2) {
                const Fragment right = b_tiles[now].fragment(col + 8 * n, j, false);
                for (int m = 0; m < 4; ++m) {
                    mma(sum[m][n], left[m], right.r[0], right.r[1]);
                    mma(sum[m][n + 1], left[m], right.r[2], right.r[3]);
                }
            }
        }
    }
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 64; ++i)
        c.put(first_row + row + i / 16 * 16 + i % 4 / 2 * 8 + g, first_col + col + i / 4 % 4 * 8 + 2 * t + i % 2,
              sum[i / 16][i / 4 % 4][i % 4]);
}

}  // namespace

void own_matmul(Tensor& c, const Tensor& a, const Tensor& b, Transpose transpose, float beta) {
    if (const std::string why = why_not_matmul(matmul_by, Device::cuda, a.dtype()); !why.empty())
        usage_error("--matmul {}", why);
    const bool a_along_k = transpose != Transpose::a, b_along_k = transpose == Transpose::b;
    const int64_t depth = a_along_k ? a.cols() : a.rows();
    const auto run = [&]<class T, class C>(T, C) {
        const auto start = [&](auto kernel, int rows, int cols, unsigned threads = kThreads) {
            launch(kernel, {dim3(blocks_for(c.rows(), rows), blocks_for(c.cols(), cols)), threads},
                   Result<C>{c.data<C>(), c.rows(), c.cols(), beta},
                   Operand<T>{a.data<T>(), c.rows(), depth, a_along_k, in_packs({&a})},
                   Operand<T>{b.data<T>(), c.cols(), depth, b_along_k, in_packs({&b})});
        };
        if (matmul_by == MatmulBy::naive) return start(naive_kernel<T, C>, kThreads / kSide, kSide);
        if (matmul_by == MatmulBy::tiled) return start(tiled_kernel<T, C>, kSide, kSide, kSide * kSide);
        if (matmul_by == MatmulBy::registers) return start(registers_kernel<T, C>, kWide, kWide);
        if constexpr (sizeof(T) == 2) {
            if (transpose == Transpose::none) start(mma_kernel<C, MmaTile<true>, MmaTile<false>>, kWide, kWide);
            if (transpose == Transpose::a) start(mma_kernel<C, MmaTile<false>, MmaTile<false>>, kWide, kWide);
            if (transpose == Transpose::b) start(mma_kernel<C, MmaTile<true>, MmaTile<true>>, kWide, kWide);
        }
    };
    if (a.dtype() == DType::f32) return run(float{}, float{});
    with_float(c.dtype(), [&](auto zero) { run(bf16{}, zero); });
}

}  // namespace train70b::cuda
