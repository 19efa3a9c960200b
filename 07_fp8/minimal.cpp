// FP8 (Micikevicius et al. 2022): the three products of each of a block's linear layers, on numbers of 8 bits. All else
// stays in fp32: embedding, norms, attention, head, dW, the weights that AdamW updates, and the x that is saved for the
// backward pass, which quantizes x and w once more.
//
//          bits: sign, exponent, mantissa     bias   largest   smallest normal, subnormal
//   E4M3         1     4         3              7       448    2^-6,  2^-9                  weights, activations
//   E5M2         1     5         2             15     57344    2^-14, 2^-16                 dY: range over precision
//
// A tensor has one scale, from its own values ("current scaling"), which maps its largest magnitude to the format's:
// data = round(x / scale_inv), scale_inv = amax / largest. (Transformer Engine's names: its `scale` is 1 / scale_inv.)
//
// Run:   build/bin/07_minimal        (not quite the loss of the other chapters: 3 bits of mantissa)
#include "01_single_gpu/minimal.h"

#include <cfloat>

#include "01_single_gpu/core/cpu_threads.h"
#include "07_fp8/complete/quantize.h"

namespace train70b::minimal {

struct Format {
    int mantissa_bits, bias;
    uint8_t largest, infinity;  // codes; E4M3 has no infinity: not a number
};
constexpr Format kE4M3 = {3, 7, 0b0'1111'110, 0b0'1111'111}, kE5M2 = {2, 15, 0b0'11110'11, 0b0'11111'00};

// The code of the number nearest to x; of two that are as near, the one whose last bit is 0.
// tag::encode[]
inline uint8_t encode(float x, const Format& f) {
    const uint8_t sign = std::signbit(x) ? 0x80 : 0;
    const float magnitude = std::abs(x);
    if (magnitude == 0) return sign;
    if (std::isnan(x)) return sign | 0x7f;
    if (std::isinf(x)) return sign | f.infinity;
    int exponent;
    std::frexp(magnitude, &exponent);  // magnitude = 0.1... (binary) * 2^exponent = 1.... * 2^(exponent - 1)
    exponent = std::max(exponent - 1, 1 - f.bias);  // below 2^(1 - bias): subnormal, all with that exponent
    // In units of the last bit of the mantissa: 8 to 16 in E4M3, 0 to 8 if subnormal. The leading 1 adds one to the
    // exponent's field, and so does a mantissa that was rounded up to the next power of two.
    const int units = int(std::nearbyint(std::ldexp(magnitude, f.mantissa_bits - exponent)));
    const int code = ((exponent + f.bias - 1) << f.mantissa_bits) + units;
    return sign | uint8_t(std::min<int>(code, f.largest));  // beyond the largest: saturates
}
// end::encode[]

inline float decode(uint8_t code, const Format& f) {
    const int field = (code & 0x7f) >> f.mantissa_bits, mantissa = code & ((1 << f.mantissa_bits) - 1);
    const int units = field == 0 ? mantissa : mantissa + (1 << f.mantissa_bits);
    const float magnitude = std::ldexp(float(units), std::max(field, 1) - f.bias - f.mantissa_bits);
    return code & 0x80 ? -magnitude : magnitude;
}

// x (rows, cols) in 8 bits with one scale_inv, by which the data is multiplied to give x again. Quantized is chapter
// 07's, and so is the product that takes it: on a GPU by tensor cores, on a CPU in fp32, of the decoded numbers.
inline Quantized quantize(const Tensor& x, DType dtype) {
    Quantized q = make_quantized(x.rows(), x.cols(), dtype, Scaling::tensor, x.device());
    if (x.device() != Device::cpu) {  // the same by chapter 07's kernels
        Tensor amax = Tensor::like(q.scale_inv), none;
        Quantized no_transpose;
        fill(amax, 0);
        compute_amax(amax, none, x, Scaling::tensor);
        compute_scale_inv(q.scale_inv, amax, dtype);
        cast(q, no_transpose, none, x);
        return q;
    }
    const Format& format = dtype == DType::e4m3 ? kE4M3 : kE5M2;
    float amax = 0;
    for (int64_t i = 0; i < x.size(); ++i) amax = std::max(amax, std::abs(x.data<float>()[i]));
    const bool usable = amax > 0 && std::isfinite(amax);
    // FLT_MIN: 1 / scale_inv has to be finite.
    const float scale_inv = usable ? std::max(amax * (1 / decode(format.largest, format)), FLT_MIN) : 1;
    const float scale = 1 / scale_inv;
    q.scale_inv.data<float>()[0] = scale_inv;
    for (int64_t i = 0; i < x.size(); ++i) q.data.data<uint8_t>()[i] = encode(x.data<float>()[i] * scale, format);
    return q;
}

// The tensor cores want the summed dimension innermost in both operands, c = a b^T. Forward it is; for dX, w has to be
// transposed, for dW both dy and x: their 8 bits, with the same scale, so nothing is rounded again.
inline Quantized transposed(const Quantized& q) {
    Quantized t = {Tensor({q.data.cols(), q.data.rows()}, q.data.dtype(), q.data.device()), q.scale_inv, q.scaling};
    transpose_fp8(t.data, q.data);
    return t;
}

// c = scale_inv_a scale_inv_b (a b^T): products of 8-bit numbers, summed in fp32.
inline Tensor multiply(const Quantized& a, const Quantized& b) {
    Tensor c({a.data.rows(), b.data.rows()}, DType::f32, a.data.device());
    scaled_matmul_into(c, a, b);
    return c;
}

struct Fp8 : OneDevice {
    // Y (R, out) = X (R, in) W (out, in)^T. W may be q, k and v, or gate and up: these share a scale.
    Tensor product(const Tensor& x, const Tensor& w) {
        return multiply(quantize(x, DType::e4m3), quantize(w, DType::e4m3));
    }
    // dW (out, in) += dY^T (out, R) X^T (in, R)^T,  dX (R, in) = dY (R, out) W^T (in, out)^T
    Tensor product_backward(const Tensor& dy, const Tensor& x, const Tensor& w, Tensor dw) {
        const Quantized dy8 = quantize(dy, DType::e5m2);
        scaled_matmul_into(dw, transposed(dy8), transposed(quantize(x, DType::e4m3)), 1);
        return multiply(dy8, transposed(quantize(w, DType::e4m3)));
    }
};

class Training {
  public:
    const Sizes s;
    Llama model;

    explicit Training(const Sizes& sizes) : s(sizes), model(s), text_(open_text(s)) { model.allocate(s); }

    Result step(int64_t number) {
        for (Unit& unit : model.units) fill(unit.grad, 0);
        const Batch batch = make_batch(text_, s, (number - 1) * s.batch, s.batch, {{0, s.T}});
        Llama::Saved saved;
        const Tensor loss = model.forward({}, saved, batch, parts_);
        model.backward({}, saved, batch, parts_);
        const double norm = std::sqrt(squares(model));
        for (Unit& unit : model.units) update(unit, unit.data, unit.grad, number, norm);
        return {read(loss)[0], norm};
    }

  private:
    const Source text_;
    Fp8 parts_;
};

static void program(int, char**) {
    set_cpu_threads(1);
    Training training({});
    train(training);
}

}  // namespace train70b::minimal

int main(int argc, char** argv) { return train70b::run_program(argc, argv, train70b::minimal::program); }
