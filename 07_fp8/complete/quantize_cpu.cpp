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
    dtype == DType::e4m3 ? body(e4m3{}) : dtype == DType::e5m2 ? body(e5m2{}) : body(int8{});
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
// Sums in 64 bits: exact.
void int8_matmul_into(Tensor& c, const Quantized& a, const Quantized& b, float beta) {
    const int64_t k = a.data.cols(), n = b.data.rows();
    const int8_t *x = a.data.data<int8_t>(), *y = b.data.data<int8_t>();
    with_float(c.dtype(), [&](auto zero) {
        using T = decltype(zero);
        parallel_rows(a.data.rows(), n * k, [&](int64_t row) {
            T* to = c.data<T>() + row * n;
            for (int64_t col = 0; col < n; ++col) {
                const int64_t sum = std::inner_product(x + row * k, x + (row + 1) * k, y + col * k, int64_t(0));
                const double scaled = double(sum) * a.scale_inv.data<float>()[row] * b.scale_inv.data<float>()[col];
                to[col] = T(float(beta == 0 ? scaled : scaled + beta * double(to[col])));
            }
        });
    });
}
}  // namespace

void scaled_matmul_into(Tensor& c, const Quantized& a, const Quantized& b, float beta) {
    if (a.data.dtype() == DType::i8) return int8_matmul_into(c, a, b, beta);
    cpu::matmul_into(c, dequantized(a), dequantized(b), Transpose::b, beta, Rows::fixed);
}

}  // namespace train70b::cpu
