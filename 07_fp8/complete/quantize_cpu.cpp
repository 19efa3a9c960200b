// The ops of quantize.h on the CPU: the definition that the CUDA kernels are tested against. A product dequantizes its
// operands to fp32 and multiplies those: the tensor cores' result up to fp32 rounding.
#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/ops/matmul.h"
#include "07_fp8/complete/formats.h"
#include "07_fp8/complete/quantize.h"

namespace train70b::cpu {

decltype(train70b::compute_amax) compute_amax;  // scales.cpp

namespace {

template <class Body>
void with_format(DType dtype, Body&& body) {
    dtype == DType::e4m3 ? body(e4m3{}) : body(e5m2{});
}

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
                        vectorized(r * cols + c0, r * cols + c1,
                                   [&](int64_t i) { data[i] = Format(float(p[i]) * scale); });
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
                        vectorized(r0, r1,
                                   [&](int64_t r) { data[c * rows + r] = Format(float(p[r * cols + c]) * scale); });
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
    cpu::matmul_into(c, dequantize(a), dequantize(b), Transpose::b, beta, Rows::fixed);
}

}  // namespace train70b::cpu
