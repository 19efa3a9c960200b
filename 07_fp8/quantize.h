#pragma once
// Tensors in 8 bits: each element is a code times a scale that it shares with others. The ops of this chapter.
//
//     scale = amax / largest value of the format        code = round(x / scale)        x is about  code * scale
//
// A product of two such tensors multiplies codes and sums in fp32; the scales come in afterwards, or, where they change
// along the sum, every 128 terms. Hopper's tensor cores want both operands with the summed dimension innermost ("TN"),
// so there is one product, c = a b^T, and whoever needs x^T y makes transposed codes: the cast writes them in the same
// pass.
#include <optional>

#include "01_single_gpu/ops/ops.h"

namespace train70b {

// Which elements of a (rows, cols) tensor share a scale.
enum class Scaling {
    tensor,   // all of them
    row,      // those of a row
    vec128,   // 128 neighbours in a row
    block128  // 128 x 128
};
const char* name_of(Scaling scaling);

// Where the scale of element (r, c) lies. The layouts are cuBLASLt's: vec128 is stored row index innermost, block128
// with its rows of scales padded to a multiple of 4.
struct ScaleLayout {
    Scaling scaling;
    int64_t rows, cols;

    constexpr int64_t blocks_in_row() const { return (cols + 127) / 128; }
    constexpr int64_t padded_blocks() const { return (blocks_in_row() + 3) / 4 * 4; }
    constexpr int64_t size() const {
        return scaling == Scaling::tensor   ? 1
               : scaling == Scaling::row    ? rows
               : scaling == Scaling::vec128 ? blocks_in_row() * rows
                                            : (rows + 127) / 128 * padded_blocks();
    }
    constexpr int64_t index(int64_t r, int64_t c) const {
        return scaling == Scaling::tensor   ? 0
               : scaling == Scaling::row    ? r
               : scaling == Scaling::vec128 ? c / 128 * rows + r
                                            : r / 128 * padded_blocks() + c / 128;
    }
};

struct Quantized {
    Tensor codes;  // (rows, cols) e4m3 or e5m2
    Tensor scale;  // fp32, as ScaleLayout says
    Scaling scaling = Scaling::tensor;

    explicit operator bool() const { return bool(codes); }
    ScaleLayout layout() const { return {scaling, codes.rows(), codes.cols()}; }
};
// Codes not yet written, and room for the scales.
Quantized make_quantized(int64_t rows, int64_t cols, DType format, Scaling scaling, Device device,
                         Memory kind = Memory::workspace);

float largest(DType format);  // 448, 57344

// amax <- max(amax, |x|) for each group of elements that shares a scale; amax_t: the same of x's transpose, in its
// layout. Either may be empty. An infinity, or what is not a number, stays in the amax.
void absolute_max(Tensor& amax, Tensor& amax_t, const Tensor& x, Scaling scaling);
// scale = amax / largest(format) * 2^margin; 1 where amax is 0 or not finite (then the codes show it).
void scale_from(Tensor& scale, const Tensor& amax, DType format, int margin = 0);
// Codes of x, with the scales that are there; of x and, in the same pass, of its transpose. Either may be empty. amax,
// if not empty: also amax[0] <- max(amax[0], |x|), for the next time. A finite x beyond the largest code saturates; an
// infinity does not.
void cast(Quantized& q, Quantized& q_t, Tensor& amax, const Tensor& x);
// to (cols, rows) = from (rows, cols), of codes.
void transpose_codes(Tensor& to, const Tensor& from);

// c (M, N) = a (M, K) b (N, K)^T + beta c. c fp32 or bf16; sums in fp32. Of two e5m2 there is no product.
void scaled_matmul_into(Tensor& c, const Quantized& a, const Quantized& b, float beta = 0);

Tensor dequantized(const Quantized& q);  // fp32, on the host

}  // namespace train70b
