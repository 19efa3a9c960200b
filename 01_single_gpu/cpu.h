#pragma once
// What the CPU kernels share: dispatch on dtype, the threads' loop, an exponential that vectorises, a row-major SGEMM.
#include <cblas.h>

#include <bit>
#include <type_traits>

#include "01_single_gpu/bf16.h"
#include "01_single_gpu/tensor.h"

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

// c (m, n) = alpha op(a) op(b) + beta c; lda, ldb, ldc: elements from one stored row to the next.
inline void sgemm(bool transpose_a, bool transpose_b, int64_t m, int64_t n, int64_t k, float alpha, const float* a,
                  int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
    cblas_sgemm(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans, transpose_b ? CblasTrans : CblasNoTrans, m, n,
                k, alpha, a, lda, b, ldb, beta, c, ldc);
}

}  // namespace train70b::cpu
