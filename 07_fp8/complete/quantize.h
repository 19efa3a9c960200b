#pragma once
// Tensors in 8 bits: FP8 data, and scales that are shared by groups of elements. The ops of this chapter.
//
//     scale_inv = amax / largest value of the format        data = round(x / scale_inv)        x ~ data * scale_inv
//
// scale_inv is Transformer Engine's name for what dequantizes: its `scale` is 1 / scale_inv. In this chapter's comments
// "a scale" always means scale_inv.
//
// A product of two such tensors multiplies FP8 data and accumulates in fp32; the scales are applied afterwards or,
// where they change along the summed dimension, every 128 terms. Hopper's tensor cores require both operands with the
// summed dimension innermost ("TN"). So there is one product, c = a b^T, and x^T y takes the data of both transposes:
// cast() writes x and x^T in one pass.
#include "01_single_gpu/ops/ops.h"
#include "07_fp8/complete/scale_layout.h"

namespace train70b {

const char* name_of(Scaling scaling);

struct Quantized {
    Tensor data;       // (rows, cols) e4m3 or e5m2
    Tensor scale_inv;  // (ScaleLayout::size()) fp32
    Scaling scaling = Scaling::tensor;

    explicit operator bool() const { return bool(data); }
    ScaleLayout layout() const { return {scaling, data.rows(), data.cols()}; }
};
// Allocates data and scales; neither is initialized.
Quantized make_quantized(int64_t rows, int64_t cols, DType format, Scaling scaling, Device device,
                         Memory kind = Memory::workspace);

float largest(DType format);  // 448, 57344

// amax <- max(amax, |x|) for each group of elements that shares a scale; amax_t: the same for x^T, in its layout.
// Either may be empty. Infinities and NaNs stay in the amax.
void compute_amax(Tensor& amax, Tensor& amax_t, const Tensor& x, Scaling scaling);
// scale_inv = amax / largest(format) * 2^margin; 1 where amax is 0 or not finite (an infinity then stays one in the
// data).
void compute_scale_inv(Tensor& scale_inv, const Tensor& amax, DType format, int margin = 0);
// Quantizes x into q and, in the same pass, x^T into q_t, with the scales that they have. Either may be empty. amax, if
// not empty: also amax[0] <- max(amax[0], |x|), for later scales. A finite x beyond the format's largest value
// saturates; an infinity does not.
void cast(Quantized& q, Quantized& q_t, Tensor& amax, const Tensor& x);
// to (cols, rows) = the transpose of from (rows, cols), FP8 data.
void transpose_fp8(Tensor& to, const Tensor& from);

// c (rows of a, rows of b) = a b^T + beta c. c fp32 or bf16; accumulates in fp32. Not both operands may be e5m2.
void scaled_matmul_into(Tensor& c, const Quantized& a, const Quantized& b, float beta = 0);

Tensor dequantized(const Quantized& q);  // fp32, on the host

}  // namespace train70b
