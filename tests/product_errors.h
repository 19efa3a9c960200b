#pragma once
// What rounding to 8 bits costs in accuracy: the error of one product.
#include <cmath>
#include <numeric>

#include "01_single_gpu/core/random.h"
#include "07_fp8/complete/formats.h"
#include "07_fp8/complete/recipes.h"

namespace train70b::test {

// Mean over rows of |difference| / |row| for a product against the same in double of unrounded operands.
struct ProductErrors {
    std::string recipe;
    double normal = 0;        // Y = X W^T of normal numbers
    double outlier_rows = 0;  // one row of X in 64 is 100 times as large
    double outlier_cols = 0;  // one column of X in 64 is 100 times as large
    double tiny = 0;          // dX = dY W: dY around 1e-7, over six decades
};
using Matrix = std::vector<double>;  // row-major

inline Tensor host_tensor(const Matrix& x, int64_t rows, int64_t cols) {
    Tensor t({rows, cols}, DType::f32, Device::cpu, Memory::workspace);
    for (size_t i = 0; i < x.size(); ++i) t.data<float>()[i] = float(x[i]);
    return t;
}

inline Matrix normal(int64_t count, uint64_t key, double size) {
    Tensor x({count}, DType::f32, Device::cpu, Memory::workspace);
    fill_normal(x, key, {.cols = count, .global_cols = count}, float(size));
    return {x.data<float>(), x.data<float>() + count};
}

// a (M, K) b (N, K)^T
inline Matrix product(const Matrix& a, const Matrix& b, int64_t K) {
    const int64_t M = int64_t(a.size()) / K, N = int64_t(b.size()) / K;
    Matrix c(static_cast<size_t>(M * N));
    for (int64_t m = 0; m < M; ++m)
        for (int64_t n = 0; n < N; ++n)
            c[size_t(m * N + n)] =
                std::inner_product(a.begin() + m * K, a.begin() + (m + 1) * K, b.begin() + n * K, 0.0);
    return c;
}

// Mean over rows, so that large rows do not speak for small ones.
inline double row_error(const Matrix& c, const Matrix& expected, int64_t cols) {
    const int64_t rows = int64_t(c.size()) / cols;
    double sum = 0;
    for (int64_t r = 0; r < rows; ++r) {
        double difference = 0, size = 0;
        for (int64_t i = r * cols; i < (r + 1) * cols; ++i) {
            difference += std::pow(c[size_t(i)] - expected[size_t(i)], 2);
            size += std::pow(expected[size_t(i)], 2);
        }
        sum += std::sqrt(difference / size) / double(rows);
    }
    return sum;
}

// What an operand (rows, cols) of a product over its columns becomes.
using Rounding = std::function<Matrix(const Matrix& x, int64_t cols, Operand::Role role)>;

inline Matrix to_bf16(const Matrix& x, int64_t cols, Operand::Role) {
    Tensor rounded({int64_t(x.size())}, DType::bf16, Device::cpu, Memory::workspace);
    copy(rounded, host_tensor(x, int64_t(x.size()) / cols, cols));
    return read(rounded);
}

inline Rounding by_recipe(const std::string& name) {
    return [name](const Matrix& x, int64_t cols, Operand::Role role) -> Matrix {
        const auto recipe = make_recipe({.recipe = name}, 3, Device::cpu, Comm());
        const Tensor back = dequantized(
            recipe
                ->quantize({role, int64_t(role)}, host_tensor(x, int64_t(x.size()) / cols, cols), Usage::rowwise, false)
                .rowwise);
        return {back.data<float>(), back.data<float>() + back.size()};
    };
}

// One scale per tensor, and the format as told; amax: what the scale was made for, as a multiple of what is there.
template <class Format>
Matrix one_scale(const Matrix& x, double amax) {
    double most = 0;
    for (const double value : x) most = std::max(most, std::abs(value));
    const double scale = amax * most / double(Format::largest());
    Matrix rounded;
    for (const double value : x) rounded.push_back(double(float(Format(float(value / scale)))) * scale);
    return rounded;
}

// MXFP8 with the OCP's scales (Microscaling Formats v1.0, section 6.3): the exponent of the largest magnitude of 32
// less that of the format's largest, 2^8, so that up to an eighth of the largest values is cut off.
inline Matrix mxfp8_floor(const Matrix& x, int64_t, Operand::Role) {
    Matrix rounded(x.size());
    for (size_t begin = 0; begin < x.size(); begin += 32) {
        float most = 0;
        for (size_t i = begin; i < begin + 32; ++i) most = std::max(most, std::abs(float(x[i])));
        const float scale = float(e8m0(most / 256, /*up=*/false));
        for (size_t i = begin; i < begin + 32; ++i) rounded[i] = double(float(e4m3(float(x[i]) / scale)) * scale);
    }
    return rounded;
}

inline std::vector<ProductErrors> product_errors(int64_t rows, int64_t in, int64_t out, uint64_t seed) {
    const auto key = [seed](uint64_t i) { return random_bits(seed, i); };
    const Matrix x = normal(rows * in, key(0), 1), w = normal(out * in, key(1), 0.02);
    Matrix x_rows = x, x_cols = x, dy = normal(rows * out, key(2), 1e-7), w_t(w.size());
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < in; ++c) {
            if (r % 64 == 5) x_rows[size_t(r * in + c)] *= 100;
            if (c % 64 == 5) x_cols[size_t(r * in + c)] *= 100;
        }
    const Matrix of_element = normal(rows * out, key(3), 0.5), of_row = normal(rows, key(4), 1.5);
    for (size_t i = 0; i < dy.size(); ++i) dy[i] *= std::pow(10, of_element[i] + of_row[i / size_t(out)]);
    for (int64_t o = 0; o < out; ++o)
        for (int64_t i = 0; i < in; ++i) w_t[size_t(i * out + o)] = w[size_t(o * in + i)];

    const auto errors = [&](const std::string& name, const Rounding& round) {
        const auto error = [&](const Matrix& a, const Matrix& b, int64_t K, Operand::Role role) {
            return row_error(product(round(a, K, role), round(b, K, Operand::weight), K), product(a, b, K),
                             int64_t(b.size()) / K);
        };
        return ProductErrors{name, error(x, w, in, Operand::input), error(x_rows, w, in, Operand::input),
                             error(x_cols, w, in, Operand::input), error(dy, w_t, out, Operand::gradient)};
    };
    const auto with_amax = [](double amax) -> Rounding {
        return [amax](const Matrix& m, int64_t, Operand::Role role) {
            return role == Operand::gradient ? one_scale<e5m2>(m, amax) : one_scale<e4m3>(m, amax);
        };
    };
    return {errors("bf16", to_bf16),
            errors("current", by_recipe("current")),
            errors("current, all E4M3", [](const Matrix& m, int64_t, Operand::Role) { return one_scale<e4m3>(m, 1); }),
            errors("current, all E5M2", [](const Matrix& m, int64_t, Operand::Role) { return one_scale<e5m2>(m, 1); }),
            errors("delayed, amax was x8", with_amax(8)),
            errors("delayed, amax was /8", with_amax(1.0 / 8)),
            errors("rowwise", by_recipe("rowwise")),
            errors("blockwise", by_recipe("blockwise")),
            errors("mxfp8, scale: OCP floor", mxfp8_floor),
            errors("mxfp8", by_recipe("mxfp8")),
            errors("nvfp4", by_recipe("nvfp4")),
            errors("int8", by_recipe("int8"))};
}

}  // namespace train70b::test
