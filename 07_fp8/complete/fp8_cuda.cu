// The kernels of this chapter: amaxes, casts with their transpose, 8-bit AdamW; and the product, by cuBLASLt.
// All of them are bound by memory: each reads its input once, and the cast writes the data of x and of x^T in one pass.
#include <cuda_fp8.h>

#include <cfloat>
#include <map>
#include <tuple>

#include "01_single_gpu/ops/cublas.cuh"
#include "07_fp8/complete/adamw8bit.h"
#include "07_fp8/complete/quantize.h"

namespace train70b::cuda {
namespace {

// Tiles of 128 x 128 elements by 256 threads: 16 across, kPack columns each; 16 down, 4 rows twice.
constexpr int kTile = 128, kAcross = kTile / kPack, kRows = 4, kHalves = 2;
static_assert(kAcross * (kTile / (kRows * kHalves)) == kThreads);

dim3 tiles_of(const Tensor& x) { return dim3(blocks_for(x.cols(), kTile), blocks_for(x.rows(), kTile)); }

// |x| as the bits of an fp32, which order like the numbers, with infinity above them and NaN above that.
__device__ unsigned magnitude(float x) { return __float_as_uint(x) & 0x7fffffff; }
// A maximum does not depend on the order: the atomic operation is deterministic.
__device__ void raise(float* amax, unsigned bits) { atomicMax(reinterpret_cast<unsigned*>(amax), bits); }

// The elements of x that a thread of a tile has, 8 columns of 4 rows. All loads come before what needs the first of
// them. Outside of x: the last row's, the last columns', which change no maximum.
template <bool kWide, class T>
__device__ void load_rows(float (&value)[kRows][kPack], const T* __restrict__ x, int64_t r, int64_t c, int64_t rows,
                          int64_t cols) {
    for (int k = 0; k < kRows; ++k)
        load<kWide>(value[k], x + min(r + k, rows - 1) * cols, kWide ? min(c, cols - kPack) : c, cols);
}

template <class T, bool kWide>
__global__ void __launch_bounds__(kThreads, 4)
    amax_kernel(float* amax, float* amax_t, const T* __restrict__ x, ScaleLayout layout, ScaleLayout layout_t) {
    __shared__ unsigned row_max[kTile], col_max[kTile];
    const int64_t rows = layout.rows, cols = layout.cols;
    const int64_t r0 = int64_t(blockIdx.y) * kTile, c0 = int64_t(blockIdx.x) * kTile;
    const int tx = threadIdx.x % kAcross, ty = threadIdx.x / kAcross;
    const bool one = layout.scaling == Scaling::tensor || layout.scaling == Scaling::block128;  // scale for the tile
    if (threadIdx.x < kTile) row_max[threadIdx.x] = col_max[threadIdx.x] = 0;
    __syncthreads();
    unsigned thread_max[kPack] = {};
    for (int h = 0; h < kHalves; ++h) {
        const int first = h * (kTile / kHalves) + ty * kRows;
        float value[kRows][kPack];
        load_rows<kWide>(value, x, r0 + first, c0 + tx * kPack, rows, cols);
        for (int k = 0; k < kRows; ++k) {
            unsigned largest = 0;
            for (int j = 0; j < kPack; ++j) {
                thread_max[j] = max(thread_max[j], magnitude(value[k][j]));
                largest = max(largest, magnitude(value[k][j]));
            }
            if (!one) atomicMax(&row_max[first + k], largest);
        }
    }
    if (one) {
        unsigned largest = 0;
        for (int j = 0; j < kPack; ++j) largest = max(largest, thread_max[j]);
        largest = block_reduce(largest, [](unsigned a, unsigned b) { return max(a, b); });
        if (threadIdx.x > 0) return;
        if (amax) raise(&amax[layout.index(r0, c0)], largest);
        if (amax_t) raise(&amax_t[layout_t.index(c0, r0)], largest);
        return;
    }
    for (int j = 0; j < kPack; ++j) atomicMax(&col_max[tx * kPack + j], thread_max[j]);
    __syncthreads();
    if (threadIdx.x < kTile) {
        const int i = threadIdx.x;
        if (amax && r0 + i < rows) raise(&amax[layout.index(r0 + i, c0)], row_max[i]);
        if (amax_t && c0 + i < cols) raise(&amax_t[layout_t.index(c0 + i, r0)], col_max[i]);
    }
}

__global__ void scale_inv_kernel(float* scale_inv, const float* amax, int64_t n, float factor) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float largest = amax[i];
    scale_inv[i] = largest > 0 && largest <= FLT_MAX ? fmaxf(largest * factor, FLT_MIN) : 1.0f;
}

// Two numbers in 8 bits, a in the lower ones. Finite ones saturate, infinity does not: Overflow::training (formats.h).
template <bool kE5M2>
__device__ unsigned fp8_pair(float a, float b) {
    unsigned pair = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kE5M2 ? __NV_E5M2 : __NV_E4M3);
    constexpr unsigned infinity = kE5M2 ? 0x7c : 0x7f;  // E4M3 has none: NaN
    if (fabsf(a) > FLT_MAX) pair = (pair & 0xff80) | infinity;
    if (fabsf(b) > FLT_MAX) pair = (pair & 0x80ff) | infinity << 8;
    return pair;
}

// Stores bytes [i, i + kPack) of p, except those from `end` on.
__device__ void store_bytes(uint8_t* p, int64_t i, int64_t end, uint2 value) {
    if (i + kPack <= end && reinterpret_cast<uintptr_t>(p + i) % kPack == 0) {
        *reinterpret_cast<uint2*>(p + i) = value;
    } else {
        for (int j = 0; j < kPack; ++j)
            if (i + j < end) p[i + j] = uint8_t((j < 4 ? value.x : value.y) >> (8 * (j % 4)));
    }
}

template <class T, bool kE5M2, bool kWide>
__global__ void __launch_bounds__(kThreads, 4)
    cast_kernel(uint8_t* data, const float* scale_inv, ScaleLayout layout, uint8_t* data_t, const float* scale_inv_t,
                ScaleLayout layout_t, float* amax, const T* __restrict__ x) {
    __shared__ float scale[kTile], scale_t[kTile];  // of the tile's rows and columns
    // [column][four rows in a word]; eight columns' words begin two banks after the eight columns' before them.
    __shared__ uint2 tile[kTile][kTile / 8];
    const int64_t rows = layout.rows, cols = layout.cols;
    const int64_t r0 = int64_t(blockIdx.y) * kTile, c0 = int64_t(blockIdx.x) * kTile;
    const int tx = threadIdx.x % kAcross, ty = threadIdx.x / kAcross, i = threadIdx.x % kTile;
    if (threadIdx.x < kTile)
        scale[i] = data && r0 + i < rows ? 1.0f / scale_inv[layout.index(r0 + i, c0)] : 0.0f;
    else
        scale_t[i] = data_t && c0 + i < cols ? 1.0f / scale_inv_t[layout_t.index(c0 + i, r0)] : 0.0f;
    __syncthreads();

    const int64_t c = c0 + tx * kPack;
    unsigned largest = 0;
    for (int h = 0; h < kHalves; ++h) {
        const int first = h * (kTile / kHalves) + ty * kRows;
        float value[kRows][kPack];
        load_rows<kWide>(value, x, r0 + first, c, rows, cols);
        for (int k = 0; k < kRows; ++k) {
            for (int j = 0; j < kPack; ++j) largest = max(largest, magnitude(value[k][j]));
            if (!data || r0 + first + k >= rows) continue;
            const float s = scale[first + k];
            const auto pair = [&](int j) { return fp8_pair<kE5M2>(value[k][j] * s, value[k][j + 1] * s); };
            store_bytes(data + (r0 + first + k) * cols, c, cols,
                        make_uint2(pair(0) | pair(2) << 16, pair(4) | pair(6) << 16));
        }
        for (int j = 0; data_t && j < kPack; ++j) {
            const float s = scale_t[tx * kPack + j];
            const auto pair = [&](int k) { return fp8_pair<kE5M2>(value[k][j] * s, value[k + 1][j] * s); };
            const int word = (first / kRows + 2 * tx) % (kTile / 4);
            reinterpret_cast<unsigned*>(tile[tx * kPack + j])[word] = pair(0) | pair(2) << 16;
        }
    }
    if (amax) {
        largest = block_reduce(largest, [](unsigned a, unsigned b) { return max(a, b); });
        if (threadIdx.x == 0) raise(amax, largest);
    }
    if (!data_t) return;
    __syncthreads();
    for (int column = ty; column < kTile && c0 + column < cols; column += kThreads / kAcross)
        store_bytes(data_t + (c0 + column) * rows, r0 + tx * kPack, rows,
                    tile[column][(tx + column / kPack) % kAcross]);
}

__global__ void transpose_kernel(uint8_t* to, const uint8_t* from, int64_t rows, int64_t cols) {
    __shared__ uint8_t tile[64][64 + 4];
    const int64_t r0 = int64_t(blockIdx.y) * 64, c0 = int64_t(blockIdx.x) * 64;
    for (int i = threadIdx.x; i < 64 * 64; i += blockDim.x) {
        const int r = i / 64, c = i % 64;
        if (r0 + r < rows && c0 + c < cols) tile[r][c] = from[(r0 + r) * cols + c0 + c];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 64 * 64; i += blockDim.x) {
        const int c = i / 64, r = i % 64;
        if (r0 + r < rows && c0 + c < cols) to[(c0 + c) * rows + r0 + r] = tile[r][c];
    }
}

cublasLtMatmulMatrixScale_t scale_mode(Scaling scaling) {
    switch (scaling) {
        case Scaling::tensor: return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
        case Scaling::row: return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
        case Scaling::vec128: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
        case Scaling::block128: break;
        case Scaling::vec32:
        case Scaling::vec16:
        case Scaling::block16: CHECK(false, "{} on a GPU", name_of(scaling));  // check_on_gpu() has refused them
    }
    return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
}

// ---- 8-bit AdamW: a warp for a block of moments, 8 of them a thread -------------------------------------------------

static_assert(kMomentBlock == 32 * kPack);
__device__ const MomentLevels kLevels = moment_levels();

// Bytes [i, i + kPack) of p; those from `end` on are 0.
__device__ uint2 load_bytes(const uint8_t* p, int64_t i, int64_t end) {
    if (i + kPack <= end && reinterpret_cast<uintptr_t>(p + i) % kPack == 0)
        return *reinterpret_cast<const uint2*>(p + i);
    uint2 value = make_uint2(0, 0);
    for (int j = 0; j < kPack; ++j)
        if (i + j < end) (j < 4 ? value.x : value.y) |= unsigned(p[i + j]) << (8 * (j % 4));
    return value;
}

__device__ float warp_max(float x) {
    for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
    return x;
}

template <class P, class G>
__global__ void adamw8bit_kernel(P* param, float* master, uint8_t* m_code, uint8_t* v_code, float* m_scale,
                                 float* v_scale, const G* grad, BlockLayout blocks, int64_t count,
                                 AdamWFactors<float> f, uint64_t key) {
    __shared__ float first[256], second[256];
    first[threadIdx.x] = kLevels.first[threadIdx.x];
    second[threadIdx.x] = kLevels.second[threadIdx.x];
    __syncthreads();
    const int64_t b = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
    if (b >= count) return;
    const auto [begin, end, global] = blocks.block(b);
    const int lane = threadIdx.x % 32;
    const int64_t i = begin + lane * kPack;
    float g[kPack], w[kPack], m[kPack], v[kPack];
    load(g, grad, i, end);
    if (master)
        load(w, master, i, end);
    else
        load(w, param, i, end);
    uint2 m_codes = load_bytes(m_code, i, end), v_codes = load_bytes(v_code, i, end);
    const auto byte = [](const uint2& from, int j) { return (j < 4 ? from.x : from.y) >> (8 * (j % 4)) & 0xff; };
    float m_most = 0, v_most = 0;
    for (int j = 0; j < kPack; ++j) {
        const bool inside = i + j < end;
        const float gradient = g[j] * f.grad_scale;
        m[j] = inside ? f.beta1 * first[byte(m_codes, j)] * m_scale[b] + (1 - f.beta1) * gradient : 0;
        v[j] = inside ? f.beta2 * second[byte(v_codes, j)] * v_scale[b] + (1 - f.beta2) * gradient * gradient : 0;
        w[j] = w[j] * f.keep - f.step_size * m[j] / (sqrtf(v[j]) * f.inv_sqrt_correction2 + f.eps);
        m_most = fmaxf(m_most, fabsf(m[j])), v_most = fmaxf(v_most, v[j]);
    }
    if (master) store(master, i, end, w);
    store(param, i, end, w);
    m_most = warp_max(m_most), v_most = warp_max(v_most);
    __syncwarp();  // every thread has read the old scales
    if (lane == 0) m_scale[b] = m_most, v_scale[b] = v_most;
    m_codes = v_codes = make_uint2(0, 0);
    for (int j = 0; j < kPack; ++j) {
        const uint64_t bits = random_bits(key, uint64_t(global + (i - begin) + j));
        const float u = float(bits >> 40) * 0x1p-24f, u2 = float(bits & 0xffffff) * 0x1p-24f;
        const unsigned code = random_code(first, m[j] * (m_most > 0 ? 1 / m_most : 0), u);
        const unsigned code2 = max(random_code(second, v[j] * (v_most > 0 ? 1 / v_most : 0), u2), uint8_t(v[j] > 0));
        (j < 4 ? m_codes.x : m_codes.y) |= code << (8 * (j % 4));
        (j < 4 ? v_codes.x : v_codes.y) |= code2 << (8 * (j % 4));
    }
    store_bytes(m_code, i, end, m_codes);
    store_bytes(v_code, i, end, v_codes);
}

}  // namespace

// ---- the ops of quantize.h -----------------------------------------------------------------------------------------

void compute_amax(Tensor& amax, Tensor& amax_t, const Tensor& x, Scaling scaling) {
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        launch(in_packs({&x}) ? amax_kernel<T, true> : amax_kernel<T, false>, {tiles_of(x)},
               amax ? amax.data<float>() : nullptr, amax_t ? amax_t.data<float>() : nullptr, x.data<T>(),
               ScaleLayout{scaling, x.rows(), x.cols()}, ScaleLayout{scaling, x.cols(), x.rows()});
    });
}

void compute_scale_inv(Tensor& scale_inv, const Tensor& amax, float factor) {
    const int64_t n = scale_inv.size();
    launch(scale_inv_kernel, {blocks_for(n, kThreads)}, scale_inv.data<float>(), amax.data<float>(), n, factor);
}

void cast(Quantized& q, Quantized& q_t, Tensor& amax, const Tensor& x) {
    const auto data = [](Quantized& to) { return to ? static_cast<uint8_t*>(to.data.raw()) : nullptr; };
    const auto scale_inv = [](const Quantized& to) { return to ? to.scale_inv.data<float>() : nullptr; };
    const ScaleLayout layout{q.scaling, x.rows(), x.cols()}, layout_t{q_t.scaling, x.cols(), x.rows()};
    const bool e5m2 = (q ? q : q_t).data.dtype() == DType::e5m2;
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const auto kernel = in_packs({&x}) ? (e5m2 ? cast_kernel<T, true, true> : cast_kernel<T, false, true>)
                                           : (e5m2 ? cast_kernel<T, true, false> : cast_kernel<T, false, false>);
        launch(kernel, {tiles_of(x)}, data(q), scale_inv(q), layout, data(q_t), scale_inv(q_t), layout_t,
               amax ? amax.data<float>() : nullptr, x.data<T>());
    });
}

void transpose_fp8(Tensor& to, const Tensor& from) {
    const dim3 tiles(blocks_for(from.cols(), 64), blocks_for(from.rows(), 64));
    launch(transpose_kernel, {tiles}, to.data<uint8_t>(), from.data<uint8_t>(), from.rows(), from.cols());
}

// cuBLASLt's first matrix is b, its second a (matmul.cu). fast accumulation stays off, its default. For scales by row
// its documentation has fp32 results, but neither E5M2 operands nor beta 1, and dW += dY^T X has both: an H100 computes
// them (tests/07_cuda.cpp).
void scaled_matmul_into(Tensor& c, const Quantized& a, const Quantized& b, float beta) {
    using Key = std::tuple<int64_t, int64_t, int64_t, DType, DType, DType, Scaling, Scaling, bool, uint32_t, uint32_t,
                           uint32_t>;
    static auto& plans = *new std::map<Key, CublasPlan>;  // until the process ends, as lt()
    for (const Tensor& x : {a.data, b.data, a.scale_inv, b.scale_inv, c})
        CHECK(alignment_of(x) >= 16,
              "cuBLASLt requires 8-bit operands, their scales and their product to be aligned to 16 bytes");
    const Key key{c.rows(),  c.cols(),  a.data.cols(), a.data.dtype(),       b.data.dtype(),       c.dtype(),
                  a.scaling, b.scaling, beta != 0,     alignment_of(a.data), alignment_of(b.data), alignment_of(c)};
    const auto scales = [&](CublasPlan& plan) {
        plan.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(b.scale_inv.raw()));
        plan.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, static_cast<const void*>(a.scale_inv.raw()));
    };
    auto plan = plans.find(key);
    if (plan == plans.end()) {
        const std::string advice = describe(
            "scales by {} and by {}, {} what c holds; try another --fp8 recipe, or sizes that are divisible by 16",
            name_of(a.scaling), name_of(b.scaling), beta != 0 ? "added to" : "replacing");
        const auto set_up = [&](CublasPlan& p) {
            p.set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, scale_mode(b.scaling));
            p.set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, scale_mode(a.scaling));
            scales(p);
        };
        plan = plans.emplace(key, make_plan(c, a.data, b.data, Transpose::b, advice, set_up)).first;
    }
    scales(plan->second);
    run(plan->second, c, a.data, b.data, beta);
}

void adamw8bit(Tensor& param, Tensor& master, Moments& moments, const Tensor& grad, const BlockLayout& blocks,
               const AdamWStep& step, uint64_t key) {
    static_assert(kThreads == kMomentBlock);
    const AdamWFactors<float> factors(step);
    with_float(param.dtype(), grad.dtype(), [&](auto param_zero, auto grad_zero) {
        using P = decltype(param_zero);
        using G = decltype(grad_zero);
        float* scale = moments.scale.data<float>();
        const int64_t count = blocks.blocks();
        launch(adamw8bit_kernel<P, G>, {blocks_for(count, kThreads / 32)}, param.data<P>(),
               master ? master.data<float>() : nullptr, moments.exp_avg.data<uint8_t>(),
               moments.exp_avg_sq.data<uint8_t>(), scale, scale + count, grad.data<G>(), blocks, count, factors, key);
    });
}

}  // namespace train70b::cuda
