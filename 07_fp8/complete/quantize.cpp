// The public functions of quantize.h: they check shapes, dtypes and devices, and call the device's implementation.
#include "07_fp8/complete/quantize.h"

#include <cmath>

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"
#include "07_fp8/complete/formats.h"

namespace train70b {

const char* name_of(Scaling scaling) {
    switch (scaling) {
        case Scaling::tensor: return "tensor";
        case Scaling::row: return "row";
        case Scaling::vec128: return "1 x 128";
        case Scaling::block128: return "128 x 128";
        case Scaling::vec32: return "1 x 32";
        case Scaling::vec16: return "1 x 16";
        case Scaling::block16: return "16 x 16";
    }
    return "?";
}

float largest(DType format) {
    if (format == DType::i8) return 127;
    if (format == DType::e2m1) return 6 * e4m3::largest();
    CHECK(format == DType::e4m3 || format == DType::e5m2, "{}", name_of(format));
    return format == DType::e4m3 ? e4m3::largest() : e5m2::largest();
}

DType scale_dtype(Scaling scaling) {
    if (scaling == Scaling::vec32) return DType::u8;
    return scaling == Scaling::vec16 || scaling == Scaling::block16 ? DType::e4m3 : DType::f32;
}

Quantized make_quantized(int64_t rows, int64_t cols, DType format, Scaling scaling, Device device, Memory kind) {
    return {Tensor({rows, cols}, format, device, kind),
            Tensor({ScaleLayout{scaling, rows, cols}.size()}, scale_dtype(scaling), device, kind), scaling};
}

namespace cpu {  // quantize_cpu.cpp
decltype(train70b::compute_amax) compute_amax;
void compute_scale_inv(Tensor& scale_inv, const Tensor& amax, float factor);
decltype(train70b::cast) cast;
decltype(train70b::transpose_fp8) transpose_fp8;
decltype(train70b::scaled_matmul_into) scaled_matmul_into;
}  // namespace cpu
namespace cuda {  // fp8_cuda.cu
decltype(train70b::compute_amax) compute_amax;
void compute_scale_inv(Tensor& scale_inv, const Tensor& amax, float factor);
decltype(train70b::cast) cast;
decltype(train70b::transpose_fp8) transpose_fp8;
decltype(train70b::scaled_matmul_into) scaled_matmul_into;
}  // namespace cuda

namespace {

bool is_fp8(DType dtype) { return dtype == DType::e4m3 || dtype == DType::e5m2; }

void check_quantized(const Quantized& q, int64_t rows, int64_t cols) {
    const DType format = q.data.dtype();
    CHECK((is_fp8(format) || format == DType::e2m1 || format == DType::i8) && q.data.rows() == rows &&
              q.data.cols() == cols,
          "FP8 data {} {}, expected {} x {}", name_of(q.data.dtype()), to_string(q.data.shape()), rows, cols);
    CHECK(q.scale_inv.dtype() == scale_dtype(q.scaling) && q.scale_inv.size() == q.layout().size(),
          "{} scales for {} by {}", q.scale_inv.size(), to_string(q.data.shape()), name_of(q.scaling));
}

}  // namespace

void compute_amax(Tensor& amax, Tensor& amax_t, const Tensor& x, Scaling scaling) {
    CHECK(is_float(x.dtype()) && (amax || amax_t), "{}", name_of(x.dtype()));
    for (const auto& [tensor, layout] : {std::pair(amax, ScaleLayout{scaling, x.rows(), x.cols()}),
                                         std::pair(amax_t, ScaleLayout{scaling, x.cols(), x.rows()})})
        CHECK(!tensor || (tensor.dtype() == DType::f32 && tensor.size() == layout.size()), "{} amaxes for {} by {}",
              tensor.size(), to_string(x.shape()), name_of(scaling));
    Span span("compute_amax", "op", 0, bytes_of({x}));
    DISPATCH(x.device(), compute_amax(amax, amax_t, x, scaling));
}

void compute_scale_inv(Tensor& scale_inv, const Tensor& amax, DType format, int margin) {
    CHECK(scale_inv.dtype() == DType::f32 && amax.dtype() == DType::f32 && scale_inv.size() == amax.size());
    Span span("compute_scale_inv", "op", 0, bytes_of({scale_inv, amax}));
    DISPATCH(device_of({scale_inv, amax}),
             compute_scale_inv(scale_inv, amax, std::ldexp(1.0f, margin) / largest(format)));
    if ((format != DType::i8 && format != DType::e2m1) || amax.device() == Device::meta) return;
    for (int64_t i = 0; i < amax.size(); ++i)
        if (!std::isfinite(amax.data<float>()[i])) scale_inv.data<float>()[i] = NAN;
}

void cast(Quantized& q, Quantized& q_t, Tensor& amax, const Tensor& x) {
    CHECK(is_float(x.dtype()) && (q || q_t), "{}", name_of(x.dtype()));
    if (q) check_quantized(q, x.rows(), x.cols());
    if (q_t) check_quantized(q_t, x.cols(), x.rows());
    CHECK(!q || !q_t || q.data.dtype() == q_t.data.dtype());
    CHECK(!amax || amax.dtype() == DType::f32);
    Span span("cast", "op", 0,
              double(x.bytes()) + double(q.data ? q.data.bytes() : 0) + double(q_t.data ? q_t.data.bytes() : 0));
    DISPATCH(x.device(), cast(q, q_t, amax, x));
}

void transpose_fp8(Tensor& to, const Tensor& from) {
    CHECK(size_of(from.dtype()) == 1 && to.dtype() == from.dtype() && to.rows() == from.cols() &&
              to.cols() == from.rows() && !to.overlaps(from),
          "{} to {}", to_string(from.shape()), to_string(to.shape()));
    Span span("transpose_fp8", "op", 0, bytes_of({to, from}));
    DISPATCH(device_of({to, from}), transpose_fp8(to, from));
}

void scaled_matmul_into(Tensor& c, const Quantized& a, const Quantized& b, float beta) {
    const int64_t m = a.data.rows(), n = b.data.rows(), k = a.data.cols();
    check_quantized(a, m, k);
    check_quantized(b, n, k);
    CHECK(is_float(c.dtype()) && c.rows() == m && c.cols() == n, "c {} {}, expected {} x {}", name_of(c.dtype()),
          to_string(c.shape()), m, n);
    const DType of_a = a.data.dtype(), of_b = b.data.dtype();
    CHECK(of_a == of_b ? of_a != DType::e5m2 : is_fp8(of_a) && is_fp8(of_b), "no product of {} and {}", name_of(of_a),
          name_of(of_b));
    CHECK(a.layout().width() == b.layout().width() &&
              (a.scaling == Scaling::tensor) == (b.scaling == Scaling::tensor) &&
              (a.scaling == Scaling::row) == (b.scaling == Scaling::row) &&
              !(a.scaling == Scaling::block128 && b.scaling == Scaling::block128),
          "no product of scales by {} and by {}", name_of(a.scaling), name_of(b.scaling));
    Span span("scaled_matmul", "op", 2.0 * double(m) * double(n) * double(k), bytes_of({c, a.data, b.data}),
              {{m, n, k}, a.data.dtype()});
    if (k == 0) return beta == 0 ? fill(c, 0) : scale(c, beta);  // as matmul_into
    if (c.size() == 0) return;
    DISPATCH(device_of({c, a.data, a.scale_inv, b.data, b.scale_inv}), scaled_matmul_into(c, a, b, beta));
}

const std::array<float, 256>& values_of(DType format) {
    return format == DType::e4m3   ? kValues<e4m3>
           : format == DType::e5m2 ? kValues<e5m2>
           : format == DType::e2m1 ? kValues<e2m1>
                                   : kValues<int8>;
}

Tensor scales_of(const Quantized& q) {
    const Tensor stored = converted(q.scale_inv, q.scale_inv.dtype(), Device::cpu);
    if (stored.dtype() == DType::f32) return stored;
    Tensor scales(stored.shape(), DType::f32, Device::cpu, Memory::workspace);
    for (int64_t i = 0; i < stored.size(); ++i) {
        const uint8_t bits = stored.data<uint8_t>()[i];
        scales.data<float>()[i] =
            q.scaling == Scaling::vec32 ? e8m0::value(bits) : kValues<e4m3>[bits] * q.tensor_scale.data<float>()[0];
    }
    return scales;
}

Tensor dequantized(const Quantized& q) {
    const Tensor data = converted(q.data, q.data.dtype(), Device::cpu), scales = scales_of(q);
    Tensor x(data.shape(), DType::f32, Device::cpu, Memory::workspace);
    const ScaleLayout layout = q.layout();
    const auto& values = values_of(q.data.dtype());
    cpu::parallel_rows(layout.rows, layout.cols, [&, cols = layout.cols](int64_t r) {
        const uint8_t* from = data.data<uint8_t>() + r * cols;
        float* to = x.data<float>() + r * cols;
        for (int64_t begin = 0; begin < cols; begin += layout.width()) {
            const float scale = scales.data<float>()[layout.index(r, begin)];
            for (int64_t c = begin; c < std::min(cols, begin + layout.width()); ++c) to[c] = values[from[c]] * scale;
        }
    });
    return x;
}

}  // namespace train70b
