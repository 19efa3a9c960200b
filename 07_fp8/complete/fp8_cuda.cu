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

template <class T>
__global__ void amax_kernel(float* amax, float* amax_t, const T* x, ScaleLayout layout, ScaleLayout layout_t) {
    __shared__ unsigned row_max[kTile], col_max[kTile];
    const int64_t rows = layout.rows, cols = layout.cols;
    const int64_t r0 = int64_t(blockIdx.y) * kTile, c0 = int64_t(blockIdx.x) * kTile;
    const int tx = threadIdx.x % kAcross, ty = threadIdx.x / kAcross;
    if (threadIdx.x < kTile) row_max[threadIdx.x] = col_max[threadIdx.x] = 0;
    __syncthreads();
    unsigned thread_max[kPack] = {};
    for (int h = 0; h < kHalves; ++h)
        for (int k = 0; k < kRows; ++k) {
            const int r = h * (kTile / kHalves) + ty * kRows + k;
            if (r0 + r >= rows) continue;
            float value[kPack];
            load(value, x + (r0 + r) * cols, c0 + tx * kPack, cols);
            unsigned largest = 0;
            for (int j = 0; j < kPack; ++j) {
                thread_max[j] = max(thread_max[j], magnitude(value[j]));
                largest = max(largest, magnitude(value[j]));
            }
            atomicMax(&row_max[r], largest);
        }
    for (int j = 0; j < kPack; ++j) atomicMax(&col_max[tx * kPack + j], thread_max[j]);
    __syncthreads();
    const bool one = layout.scaling == Scaling::tensor || layout.scaling == Scaling::block128;
    if (one) {  // one scale for the whole tile
        unsigned largest = threadIdx.x < kTile ? row_max[threadIdx.x] : 0;
        largest = block_reduce(largest, [](unsigned a, unsigned b) { return max(a, b); });
        if (threadIdx.x > 0) return;
        if (amax) raise(&amax[layout.index(r0, c0)], largest);
        if (amax_t) raise(&amax_t[layout_t.index(c0, r0)], largest);
    } else if (threadIdx.x < kTile) {
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

template <bool kE5M2>
__device__ unsigned fp8_of(float x) {  // Overflow::training of formats.h
    constexpr __nv_fp8_interpretation_t kind = kE5M2 ? __NV_E5M2 : __NV_E4M3;
    return fabsf(x) <= FLT_MAX ? __nv_cvt_float_to_fp8(x, __NV_SATFINITE, kind)
                               : __nv_cvt_float_to_fp8(x, __NV_NOSAT, kind);
}

// Stores elements [i, i + kPack) of p, except those from `end` on.
__device__ void store_fp8(uint8_t* p, int64_t i, int64_t end, const unsigned (&value)[kPack]) {
    if (i + kPack <= end && reinterpret_cast<uintptr_t>(p + i) % kPack == 0) {
        uint2 packed = {};
        for (int j = 0; j < 4; ++j) packed.x |= value[j] << (8 * j), packed.y |= value[4 + j] << (8 * j);
        *reinterpret_cast<uint2*>(p + i) = packed;
    } else {
        for (int j = 0; j < kPack; ++j)
            if (i + j < end) p[i + j] = uint8_t(value[j]);
    }
}

template <class T, bool kE5M2>
__global__ void cast_kernel(uint8_t* data, const float* scale_inv, ScaleLayout layout, uint8_t* data_t,
                            const float* scale_inv_t, ScaleLayout layout_t, float* amax, const T* x) {
    __shared__ unsigned tile[kTile][kTile / 4 + 1];  // [column][four rows in a word]
    const int64_t rows = layout.rows, cols = layout.cols;
    const int64_t r0 = int64_t(blockIdx.y) * kTile, c0 = int64_t(blockIdx.x) * kTile;
    const int tx = threadIdx.x % kAcross, ty = threadIdx.x / kAcross;
    float scale_t[kPack];
    for (int j = 0; data_t && j < kPack; ++j) {
        const int64_t c = c0 + tx * kPack + j;
        scale_t[j] = c < cols ? 1.0f / scale_inv_t[layout_t.index(c, r0)] : 0.0f;
    }
    unsigned largest = 0;
    for (int h = 0; h < kHalves; ++h) {
        unsigned word[kPack] = {};
        for (int k = 0; k < kRows; ++k) {
            const int64_t r = r0 + h * (kTile / kHalves) + ty * kRows + k;
            if (r >= rows) continue;
            float value[kPack];
            load(value, x + r * cols, c0 + tx * kPack, cols);
            for (int j = 0; j < kPack; ++j) largest = max(largest, magnitude(value[j]));
            if (data) {
                const float scale = 1.0f / scale_inv[layout.index(r, c0)];
                unsigned fp8[kPack];
                for (int j = 0; j < kPack; ++j) fp8[j] = fp8_of<kE5M2>(value[j] * scale);
                store_fp8(data + r * cols, c0 + tx * kPack, cols, fp8);
            }
            for (int j = 0; data_t && j < kPack; ++j) word[j] |= fp8_of<kE5M2>(value[j] * scale_t[j]) << (8 * k);
        }
        for (int j = 0; data_t && j < kPack; ++j) tile[tx * kPack + j][(h * (kTile / kHalves)) / 4 + ty] = word[j];
    }
    if (amax) {
        largest = block_reduce(largest, [](unsigned a, unsigned b) { return max(a, b); });
        if (threadIdx.x == 0) raise(amax, largest);
    }
    if (!data_t) return;
    __syncthreads();
    for (int c = ty; c < kTile; c += kThreads / kAcross) {  // a column of x is a row of its transpose
        if (c0 + c >= cols) break;
        unsigned fp8[kPack];
        for (int j = 0; j < kPack; ++j) fp8[j] = tile[c][tx * 2 + j / 4] >> (8 * (j % 4)) & 0xff;
        store_fp8(data_t + (c0 + c) * rows, r0 + tx * kPack, rows, fp8);
    }
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
    }
    return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
}

// ---- 8-bit AdamW: a block of threads for a block of moments ---------------------------------------------------------

__constant__ MomentLevels kLevels = moment_levels();

template <class P, class G>
__global__ void adamw8bit_kernel(P* param, float* master, uint8_t* m_code, uint8_t* v_code, float* m_scale,
                                 float* v_scale, const G* grad, BlockLayout blocks, AdamWFactors<float> f,
                                 uint64_t key) {
    __shared__ float first[256], second[256];  // threads read different elements, which constant memory would serialize
    first[threadIdx.x] = kLevels.first[threadIdx.x];
    second[threadIdx.x] = kLevels.second[threadIdx.x];
    __syncthreads();
    const int64_t b = blockIdx.x;
    const auto [begin, end, global] = blocks.block(b);
    const int64_t i = begin + threadIdx.x;
    const bool inside = i < end;
    float m = 0, v = 0;
    if (inside) {
        const float gradient = to_float(grad[i]) * f.grad_scale;
        m = f.beta1 * first[m_code[i]] * m_scale[b] + (1 - f.beta1) * gradient;
        v = f.beta2 * second[v_code[i]] * v_scale[b] + (1 - f.beta2) * gradient * gradient;
        const float w_old = master ? master[i] : to_float(param[i]);
        const float w = w_old * f.keep - f.step_size * m / (sqrtf(v) * f.inv_sqrt_correction2 + f.eps);
        if (master) master[i] = w;
        param[i] = from_float<P>(w);
    }
    const float m_most = block_reduce(fabsf(m), Max()), v_most = block_reduce(v, Max());
    if (threadIdx.x == 0) m_scale[b] = m_most, v_scale[b] = v_most;
    if (!inside) return;
    const uint64_t bits = random_bits(key, uint64_t(global + i - begin));
    const float u = float(bits >> 40) * 0x1p-24f, u2 = float(bits & 0xffffff) * 0x1p-24f;
    m_code[i] = random_code(first, m * (m_most > 0 ? 1 / m_most : 0), u);
    v_code[i] = max(random_code(second, v * (v_most > 0 ? 1 / v_most : 0), u2), uint8_t(v > 0));
}

}  // namespace

// ---- the ops of quantize.h -----------------------------------------------------------------------------------------

void compute_amax(Tensor& amax, Tensor& amax_t, const Tensor& x, Scaling scaling) {
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        launch(amax_kernel<T>, {tiles_of(x)}, amax ? amax.data<float>() : nullptr,
               amax_t ? amax_t.data<float>() : nullptr, x.data<T>(), ScaleLayout{scaling, x.rows(), x.cols()},
               ScaleLayout{scaling, x.cols(), x.rows()});
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
        launch(e5m2 ? cast_kernel<T, true> : cast_kernel<T, false>, {tiles_of(x)}, data(q), scale_inv(q), layout,
               data(q_t), scale_inv(q_t), layout_t, amax ? amax.data<float>() : nullptr, x.data<T>());
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
        launch(adamw8bit_kernel<P, G>, {blocks_for(blocks.blocks(), 1)}, param.data<P>(),
               master ? master.data<float>() : nullptr, moments.exp_avg.data<uint8_t>(),
               moments.exp_avg_sq.data<uint8_t>(), scale, scale + blocks.blocks(), grad.data<G>(), blocks, factors,
               key);
    });
}

}  // namespace train70b::cuda
