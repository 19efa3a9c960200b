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
    Tensor data;       // (rows, cols) e4m3, e5m2, e2m1 or i8
    Tensor scale_inv;  // (ScaleLayout::size()) fp32; vec32: u8, the bits of an e8m0; vec16, block16: e4m3
    Scaling scaling = Scaling::tensor;
    Tensor tensor_scale = {};  // (1) fp32, with e4m3 scales: what multiplies them

    explicit operator bool() const { return bool(data); }
    ScaleLayout layout() const { return {scaling, data.rows(), data.cols()}; }
};
// Allocates data and scales; neither is initialized.
Quantized make_quantized(int64_t rows, int64_t cols, DType format, Scaling scaling, Device device,
                         Memory kind = Memory::workspace);

float largest(DType format);  // 448, 57344; i8: 127; e2m1: 6 * 448, the largest scale included
const std::array<float, 256>& values_of(DType format);  // of all codes
DType scale_dtype(Scaling scaling);

// amax <- max(amax, |x|) for each group of elements that shares a scale; amax_t: the same for x^T, in its layout.
// Either may be empty. Infinities and NaNs stay in the amax.
void compute_amax(Tensor& amax, Tensor& amax_t, const Tensor& x, Scaling scaling);
// scale_inv = amax / largest(format) * 2^margin; 1 where amax is 0 or not finite (an infinity then stays one in the
// data; where the format has none, the scale is NaN).
void compute_scale_inv(Tensor& scale_inv, const Tensor& amax, DType format, int margin = 0);
// Quantizes x into q and, in the same pass, x^T into q_t, with the scales that they have. Either may be empty. amax, if
// not empty: also amax[0] <- max(amax[0], |x|), for later scales. A finite x beyond the format's largest value
// saturates; an infinity does not.
void cast(Quantized& q, Quantized& q_t, Tensor& amax, const Tensor& x);
// Sixteen numbers times a Hadamard matrix with random signs, H / 4 diag(+-1): orthogonal, the same for both operands of
// a product, which it does not change; it spreads an outlier over the sixteen.
void hadamard16(float* x);
struct StochasticRounding {  // of element (r, c) of x, by the random bits of (row_begin + r, cols[c])
    uint64_t key = 0;        // 0: to nearest
    int64_t row_begin = 0;
    std::vector<int64_t> cols = {};  // empty: 0, 1, 2 ...
};
// x, or x^T, in small blocks (vec32, vec16, block16), of which it computes the scales; q.tensor_scale is known.
// transformed: by hadamard16, along the rows. On CPUs.
void quantize_blocks(Quantized& q, const Tensor& x, bool transposed, bool transformed,
                     const StochasticRounding& random);
// to (cols, rows) = the transpose of from (rows, cols), FP8 data.
void transpose_fp8(Tensor& to, const Tensor& from);

// c (rows of a, rows of b) = a b^T + beta c. c fp32 or bf16; accumulates in fp32, products of i8 exactly. Not both
// operands may be e5m2.
void scaled_matmul_into(Tensor& c, const Quantized& a, const Quantized& b, float beta = 0);

Tensor scales_of(const Quantized& q);    // fp32, on the host: what multiplies the data
Tensor dequantized(const Quantized& q);  // fp32, on the host

}  // namespace train70b
