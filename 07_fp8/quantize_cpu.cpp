// The ops of quantize.h on the CPU: the definition that the CUDA kernels are tested against. A product dequantizes its
// operands to fp32 and multiplies those: the tensor cores' result up to fp32 rounding.
#include <vector>

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/ops/matmul.h"
#include "07_fp8/formats.h"
#include "07_fp8/quantize.h"

namespace train70b::cpu {

namespace {

template <class Body>
void with_format(DType dtype, Body&& body) {
    dtype == DType::e4m3 ? body(e4m3{}) : body(e5m2{});
}

// |x| as the bits of an fp32, which order like the numbers, with infinity above them and NaN above that.
uint32_t magnitude(float x) { return std::bit_cast<uint32_t>(x) & 0x7fffffff; }
void raise(float& amax, uint32_t bits) { amax = std::bit_cast<float>(std::max(magnitude(amax), bits)); }

constexpr int64_t kTile = 128;  // rows and columns of x per tile: one scale block, which fits the cache

// body(row_begin, row_end, col_begin, col_end) for each tile of x.
template <class Body>
void for_tiles(const Tensor& x, Body&& body) {
    const int64_t rows = x.rows(), cols = x.cols(), across = (cols + kTile - 1) / kTile;
    parallel_ranges((rows + kTile - 1) / kTile * across, 1, [&](int64_t begin, int64_t end) {
        for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t r = tile / across * kTile, c = tile % across * kTile;
            body(r, std::min(rows, r + kTile), c, std::min(cols, c + kTile));
        }
    });
}

}  // namespace

void compute_amax(Tensor& amax, Tensor& amax_t, const Tensor& x, Scaling scaling) {
    const int64_t rows = x.rows(), cols = x.cols();
    const ScaleLayout layout{scaling, rows, cols}, layout_t{scaling, cols, rows};
    with_float(x.dtype(), [&](auto zero) {
        const auto* p = x.data<decltype(zero)>();
        std::vector<uint32_t> row_max(static_cast<size_t>(rows)), col_max(static_cast<size_t>(cols));
        for (int64_t r0 = 0; r0 < rows; r0 += kTile)
            for (int64_t c0 = 0; c0 < cols; c0 += kTile) {
                const int64_t r1 = std::min(rows, r0 + kTile), c1 = std::min(cols, c0 + kTile);
                std::fill(row_max.begin() + r0, row_max.begin() + r1, 0);
                std::fill(col_max.begin() + c0, col_max.begin() + c1, 0);
                for (int64_t r = r0; r < r1; ++r) {
                    uint32_t most = 0;
#pragma omp simd reduction(max : most)
                    for (int64_t c = c0; c < c1; ++c) {
                        const uint32_t bits = magnitude(float(p[r * cols + c]));
                        most = std::max(most, bits);
                        col_max[size_t(c)] = std::max(col_max[size_t(c)], bits);
                    }
                    row_max[size_t(r)] = most;
                }
                for (int64_t r = r0; amax && r < r1; ++r)
                    raise(amax.data<float>()[layout.index(r, c0)], row_max[size_t(r)]);
                for (int64_t c = c0; amax_t && c < c1; ++c)
                    raise(amax_t.data<float>()[layout_t.index(c, r0)], col_max[size_t(c)]);
            }
    });
}

void compute_scale_inv(Tensor& scale_inv, const Tensor& amax, float factor) {
    constexpr float kSmallest = std::numeric_limits<float>::min();  // 1 / scale_inv is finite
    for (int64_t i = 0; i < scale_inv.size(); ++i) {
        const float most = amax.data<float>()[i];
        const bool usable = most > 0 && most <= std::numeric_limits<float>::max();
        scale_inv.data<float>()[i] = usable ? std::max(most * factor, kSmallest) : 1.0f;
    }
}

void cast(Quantized& q, Quantized& q_t, Tensor& amax, const Tensor& x) {
    const int64_t rows = x.rows(), cols = x.cols();
    with_float(x.dtype(), [&](auto zero) {
        const auto* p = x.data<decltype(zero)>();
        with_format((q ? q : q_t).data.dtype(), [&](auto format) {
            using Format = decltype(format);
            if (q) {
                const ScaleLayout layout = q.layout();
                Format* data = q.data.data<Format>();
                const float* scale_inv = q.scale_inv.data<float>();
                for_tiles(x, [&](int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
                    for (int64_t r = r0; r < r1; ++r) {  // within a tile, a row has one scale in every scaling
                        const float scale = 1.0f / scale_inv[layout.index(r, c0)];
#pragma omp simd
                        for (int64_t c = c0; c < c1; ++c) data[r * cols + c] = Format(float(p[r * cols + c]) * scale);
                    }
                });
            }
            if (q_t) {
                const ScaleLayout layout = q_t.layout();
                Format* data = q_t.data.data<Format>();
                const float* scale_inv = q_t.scale_inv.data<float>();
                for_tiles(x, [&](int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
                    for (int64_t c = c0; c < c1; ++c) {
                        const float scale = 1.0f / scale_inv[layout.index(c, r0)];
#pragma omp simd
                        for (int64_t r = r0; r < r1; ++r) data[c * rows + r] = Format(float(p[r * cols + c]) * scale);
                    }
                });
            }
        });
    });
    if (!amax) return;
    Tensor first = amax.element_slice(0, {1}), none;
    cpu::compute_amax(first, none, x, Scaling::tensor);
}

void transpose_fp8(Tensor& to, const Tensor& from) {
    const int64_t rows = from.rows(), cols = from.cols();
    const uint8_t* p = from.data<uint8_t>();
    uint8_t* t = to.data<uint8_t>();
    for_tiles(from, [&](int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
        for (int64_t c = c0; c < c1; ++c)
            for (int64_t r = r0; r < r1; ++r) t[c * rows + r] = p[r * cols + c];
    });
}

namespace {
Tensor dequantize(const Quantized& q) {
    Tensor x(q.data.shape(), DType::f32, Device::cpu, Memory::workspace);
    const ScaleLayout layout = q.layout();
    with_format(q.data.dtype(), [&](auto format) {
        const uint8_t* data = q.data.data<uint8_t>();
        const float* scale_inv = q.scale_inv.data<float>();
        float* p = x.data<float>();
        for_tiles(q.data, [&](int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
            for (int64_t r = r0; r < r1; ++r) {
                const float factor = scale_inv[layout.index(r, c0)];
                for (int64_t c = c0; c < c1; ++c)
                    p[r * layout.cols + c] = kValues<decltype(format)>[data[r * layout.cols + c]] * factor;
            }
        });
    });
    return x;
}
}  // namespace

void scaled_matmul_into(Tensor& c, const Quantized& a, const Quantized& b, float beta) {
    cpu::matmul_into(c, dequantize(a), dequantize(b), Transpose::b, beta);
}

}  // namespace train70b::cpu
