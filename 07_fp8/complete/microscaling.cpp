// Small blocks of 4 and 8 bits: MXFP8 and NVFP4, on CPUs. Blackwell's tensor cores apply such scales; here a product
// dequantizes its operands.
#include <bit>
#include <vector>

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/random.h"
#include "07_fp8/complete/formats.h"
#include "07_fp8/complete/recipes.h"

namespace train70b {

void hadamard16(float* x) {
    constexpr unsigned kMinus = 0b1101011111101000;  // drawn once for all layers and steps
    for (int i = 0; i < 16; ++i) x[i] = kMinus >> i & 1 ? -x[i] : x[i];
    for (int half = 1; half < 16; half *= 2)
        for (int first = 0; first < 16; first += 2 * half)
            for (int i = first; i < first + half; ++i) {
                const float a = x[i], b = x[i + half];
                x[i] = a + b, x[i + half] = a - b;
            }
    for (int i = 0; i < 16; ++i) x[i] *= 0.25f;
}

namespace {

constexpr int64_t kBand = 16;  // rows: of one block, or of many

float amax_of(const float* x, int64_t count) {  // infinities and NaNs stay
    uint32_t most = 0;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, std::bit_cast<uint32_t>(x[i]) & 0x7fffffff);
    return std::bit_cast<float>(most);
}

// body(first row, rows, their numbers in fp32) for each band of x, or of x^T, transformed or not.
template <class Body>
void for_bands(const Tensor& x, bool transposed, bool transformed, Body&& body) {
    const int64_t rows = transposed ? x.cols() : x.rows(), cols = transposed ? x.rows() : x.cols();
    cpu::with_float(x.dtype(), [&](auto zero) {
        const auto* p = x.data<decltype(zero)>();
        cpu::parallel_ranges((rows + kBand - 1) / kBand, 1, [&](int64_t begin, int64_t end) {
            std::vector<float> v(size_t(kBand * cols));
            for (int64_t first = begin * kBand; first < std::min(rows, end * kBand); first += kBand) {
                const int64_t here = std::min(kBand, rows - first);
                for (int64_t r = 0; r < here; ++r)
                    for (int64_t c = 0; c < cols; ++c)
                        v[size_t(r * cols + c)] = float(p[transposed ? c * rows + first + r : (first + r) * cols + c]);
                for (int64_t i = 0; transformed && i < here * cols; i += 16) hadamard16(&v[size_t(i)]);
                body(first, here, v.data());
            }
        });
    });
}

// amax[0] <- max(amax[0], |the transformed x^T|).
void transformed_amax(Tensor& amax, const Tensor& x) {
    if (x.device() == Device::meta) return;
    std::vector<float> of_band(size_t((x.cols() + kBand - 1) / kBand));
    for_bands(x, true, true, [&](int64_t first, int64_t rows, const float* v) {
        of_band[size_t(first / kBand)] = amax_of(v, rows * x.rows());
    });
    of_band.push_back(amax.data<float>()[0]);
    amax.data<float>()[0] = amax_of(of_band.data(), int64_t(of_band.size()));
}

}  // namespace

void quantize_blocks(Quantized& q, const Tensor& x, bool transposed, bool transformed,
                     const StochasticRounding& random) {
    if (x.device() == Device::meta) return;
    CHECK(x.device() == Device::cpu);
    const ScaleLayout layout = q.layout();
    const int64_t cols = layout.cols, width = layout.width(), height = layout.height();
    const bool mx = layout.scaling == Scaling::vec32;
    const float tensor_scale = mx ? 1 : q.tensor_scale.data<float>()[0];
    uint8_t *data = q.data.data<uint8_t>(), *scales = q.scale_inv.data<uint8_t>();
    const auto uniform = [&](int64_t r, int64_t c) {
        if (transposed) std::swap(r, c);
        const uint64_t row = uint64_t(random.row_begin + r), col = uint64_t(random.cols.empty() ? c : random.cols[c]);
        return float(random_bits(random.key, row << 32 | col) >> 40) * 0x1p-24f;
    };
    for_bands(x, transposed, transformed, [&](int64_t first, int64_t rows, const float* v) {
        for (int64_t r0 = 0; r0 < rows; r0 += height)
            for (int64_t c0 = 0; c0 < cols; c0 += width) {
                const int64_t r1 = std::min(rows, r0 + height), c1 = std::min(cols, c0 + width);
                float amax = 0;
                for (int64_t r = r0; r < r1; ++r) amax = std::max(amax_of(v + r * cols + c0, c1 - c0), amax);
                uint8_t& scale = scales[layout.index(first + r0, c0)];
                float inverse;
                if (mx) {
                    scale = e8m0(amax / e4m3::largest()).bits;  // rounded up
                    inverse = 1 / e8m0::value(scale);
                } else {
                    scale = e4m3(amax / 6 / tensor_scale).bits;
                    inverse = std::min(1 / (e4m3::value(scale) * tensor_scale), std::numeric_limits<float>::max());
                }
                const auto encode = [&](const auto& code) {
                    for (int64_t r = r0; r < r1; ++r)
                        cpu::vectorized(c0, c1, [&](int64_t c) {
                            data[(first + r) * cols + c] = code(v[r * cols + c] * inverse, first + r, c).bits;
                        });
                };
                if (mx)
                    encode([](float value, int64_t, int64_t) { return e4m3(value); });
                else if (random.key == 0)
                    encode([](float value, int64_t, int64_t) { return e2m1(value); });
                else
                    encode([&](float value, int64_t r, int64_t c) { return e2m1(value, uniform(r, c)); });
            }
    });
}

QuantizedPair Mxfp8Scaling::quantize(const Operand& operand, const Tensor& x, Usage usage, bool, Memory kind) {
    QuantizedPair pair = allocate(operand, x, usage, kind);
    if (pair.rowwise) quantize_blocks(pair.rowwise, x, false, false, {});
    if (pair.columnwise) quantize_blocks(pair.columnwise, x, true, false, {});
    return pair;
}

void Nvfp4Scaling::begin_step(int64_t step) {
    step_ = step;
    passes_.clear();
}

QuantizedPair Nvfp4Scaling::quantize(const Operand& operand, const Tensor& x, Usage usage, bool, Memory kind) {
    QuantizedPair pair = allocate(operand, x, usage, kind);
    const bool weight = operand.role == Operand::weight, gradient = operand.role == Operand::gradient;
    const bool sharded = operand.rows_sharded || operand.cols_sharded;
    Tensor amax = operand.amax, amax_t = operand.amax, none;
    if (!amax) {  // one message for both
        Tensor both = zeros({weight ? 1 : 2}, DType::f32, x.device(), Memory::workspace);
        amax = both.row_slice(0, 1), amax_t = weight ? amax : both.row_slice(1, 2);
        if (pair.rowwise || weight) compute_amax(amax, none, x, Scaling::tensor);
        if (pair.columnwise && !weight) transformed_amax(amax_t, x);
        if (sharded) ranks_.all_reduce(both, Reduce::max).wait();
    }
    StochasticRounding random{.row_begin = operand.rows_sharded ? ranks_.rank() * x.rows() : 0, .cols = operand.outs};
    uint64_t key = 0;
    if (gradient) key = random_bits(random_bits(operand.key, uint64_t(step_)), passes_[operand.index]++);
    const auto round = [&](Quantized& q, const Tensor& most, bool transposed) {
        q.tensor_scale = Tensor({1}, DType::f32, x.device(), transposed ? kind : Memory::workspace);
        compute_scale_inv(q.tensor_scale, most, DType::e2m1);
        if (gradient) random.key = random_bits(key, transposed);
        quantize_blocks(q, x, transposed, transposed && !weight, random);
    };
    if (pair.rowwise) round(pair.rowwise, amax, false);
    if (pair.columnwise) round(pair.columnwise, amax_t, true);
    return pair;
}

}  // namespace train70b
