#pragma once
// What the CPU kernels share: dispatch on dtype, the threads' loop, an exponential that vectorises, row-major products.
#include <cblas.h>

#include <bit>
#include <type_traits>

#include "01_single_gpu/core/bf16.h"
#include "01_single_gpu/core/tensor.h"

namespace train70b::cpu {

// Calls body with a value of the element type: with_float(x.dtype(), [&](auto zero) { using T = decltype(zero); ... })
template <class Body>
void with_float(DType dtype, Body&& body) {
    if (dtype == DType::f32)
        body(float{});
    else if (dtype == DType::bf16)
        body(bf16{});
    else if (dtype == DType::f64)
        body(double{});
    else
        CHECK(false, "no CPU kernel for {}", name_of(dtype));
}

// The same of a statistic (stats_dtype): float or double.
template <class Body>
void with_wide(DType dtype, Body&& body) {
    if (dtype == DType::f64)
        body(double{});
    else
        body(float{});
}

// What a kernel computes in: double where it reads or writes fp64, else float.
template <class... T>
using Wide = std::conditional_t<(std::is_same_v<T, double> || ...), double, float>;

// body(begin, end) over contiguous parts of [0, count), one per thread. Where the parts end depends on the number of
// threads, so no result may: a sum never crosses a part.
template <class Body>
void parallel_ranges(int64_t count, int64_t at_least, Body&& body) {
    const int64_t wanted = std::max<int64_t>(1, count / std::max<int64_t>(at_least, 1));
#pragma omp parallel for schedule(static) if (wanted > 1)
    for (int64_t part = 0; part < wanted; ++part) body(count * part / wanted, count * (part + 1) / wanted);
}

// Rows of about 4096 elements together make a part worth a thread.
template <class Body>
void parallel_rows(int64_t rows, int64_t cols, Body&& body) {
    parallel_ranges(rows, 1 + 4096 / std::max<int64_t>(cols, 1), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) body(row);
    });
}

template <class Body>
void parallel_elements(int64_t count, Body&& body) {
    parallel_ranges(count, 8192, [&](int64_t begin, int64_t end) {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) body(i);
    });
}

// e^x to 1 unit in the last place or so, without a branch or a call, so that loops of it vectorise: e^x = 2^n e^r with
// |r| <= ln(2)/2 and a polynomial (the minimax coefficients of Cephes' expf) for e^r. Below -87.3 it gives 0; NaN stays
// NaN.
inline float exp_simd(float x) {
    const float clamped = x < -87.3f ? -87.3f : (x > 88.3f ? 88.3f : x);
    const float n = __builtin_rintf(clamped * 1.44269504f);
    const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const float result = p * std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
    const float low = x < -87.3f ? 0.0f : result;
    const float high = x > 88.3f ? __builtin_inff() : low;
    return x == x ? high : x;
}

// The same in double: Taylor's polynomial of degree 13, whose remainder is 4e-18 at |r| = ln(2)/2. Below -708 it gives
// 0 (the result would soon be subnormal), above 709 infinity.
inline double exp_simd(double x) {
    const double clamped = x < -708.0 ? -708.0 : (x > 709.0 ? 709.0 : x);
    const double n = __builtin_rint(clamped * 1.4426950408889634);
    const double r = (clamped - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;  // ln(2) in two parts, n times exact
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r * r + r + 1.0;
    // n as an integer in the last bits of 1.5 * 2^52 + n: AVX2 has no conversion from double to 64-bit integers.
    const uint64_t exponent = std::bit_cast<uint64_t>(n + 0x1.8p52) + 1023;
    const double result = p * std::bit_cast<double>(exponent << 52);
    const double low = x < -708.0 ? 0.0 : result;
    const double high = x > 709.0 ? __builtin_inf() : low;
    return x == x ? high : x;
}

// c (m, n) = alpha op(a) op(b) + beta c; lda, ldb, ldc: elements from one stored row to the next.
inline void gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
                 int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
    cblas_sgemm(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans, transpose_b ? CblasTrans : CblasNoTrans, m, n,
                k, alpha, a, lda, b, ldb, beta, c, ldc);
}
inline void gemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, double alpha, const double* a,
                 int64_t lda, const double* b, int64_t ldb, double beta, double* c, int64_t ldc) {
    cblas_dgemm(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans, transpose_b ? CblasTrans : CblasNoTrans, m, n,
                k, alpha, a, lda, b, ldb, beta, c, ldc);
}

}  // namespace train70b::cpu
