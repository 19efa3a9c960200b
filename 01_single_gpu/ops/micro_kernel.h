#pragma once
// The matrix products of attention's tiles, C (m, n) = A (m, k) B (k, n) or C += A B, with a block of C in registers:
// what the BLAS literature calls a micro-kernel. A BLAS call on a tile of 64 x 64 x 16 spends much of its time packing.
//   One step of k loads a row of B (kBlockVectors vectors) and broadcasts a column of A one number at a time; each
//   number and each vector take one fused multiply-add. A has two strides, so that a transposed A is never copied; B
//   and C are row-major. The caller pads the tiles: m to kBlockRows, n to kPad elements; k is exact.
// Everything here has internal linkage: see attention_tiled_kernel.cpp for the reason.
#include <cstdint>
#include <utility>

#include "01_single_gpu/core/exp_coefficients.h"

namespace train70b::cpu {
namespace {

// Enough accumulators to hide the latency of the multiply-add, and few enough to leave registers for B: 16 of AVX-512's
// 32 registers, 12 of AVX2's 16.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kBlockRows = 8, kBlockVectors = 2;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kBlockRows = 4, kBlockVectors = 3;
#else
constexpr int kVectorBytes = 16, kBlockRows = 4, kBlockVectors = 3;
#endif
constexpr int64_t kPad = 16;  // elements: whole vectors of float and of double, and whole blocks of rows

template <class C>
struct Simd {
    typedef C Vector __attribute__((vector_size(kVectorBytes)));
    typedef C Unaligned __attribute__((vector_size(kVectorBytes), aligned(alignof(C)), may_alias));
    static constexpr int lanes = kVectorBytes / sizeof(C);
    static_assert(kPad % lanes == 0 && kPad % kBlockRows == 0);

    static Vector load(const C* p) { return *reinterpret_cast<const Unaligned*>(p); }
    static void store(C* p, Vector v) { *reinterpret_cast<Unaligned*>(p) = v; }
    static Vector all(C x) { return Vector{} + x; }
    // op over all lanes, by halves.
    template <int Step = lanes / 2, class Op>
    static C reduce(Vector v, const Op& op) {
        if constexpr (Step == 0)
            return v[0];
        else
            return reduce<Step / 2>(op(v, rotate<Step>(v, std::make_integer_sequence<int, lanes>())), op);
    }
    template <int Step, int... I>
    static Vector rotate(Vector v, std::integer_sequence<int, I...>) {
        return __builtin_shufflevector(v, v, (I + Step) % lanes...);
    }
    static Vector larger(Vector a, Vector b) { return a > b ? a : b; }  // b where a is NaN
    static C max(Vector v) { return reduce(v, larger); }
    static C sum(Vector v) {
        return reduce(v, [](Vector a, Vector b) { return a + b; });
    }
};

template <class C>
using Vector = typename Simd<C>::Vector;

// e^x of every lane; NaN stays NaN. The polynomials of cpu.h's exp_simd, but n is rounded by adding a constant, and
// x is not clamped: the last two lines of each replace the results that overflowed.
inline Vector<float> exp_of(Vector<float> x) {
    typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
    constexpr float kRound = 0x1.8p23f;  // adding it leaves the nearest integer in the last bits
    const Vector<float> shifted = x * kLog2EFloat + kRound, n = shifted - kRound;
    const Vector<float> r = (x - n * kLn2HighFloat) - n * kLn2LowFloat;
    Vector<float> p = r * kExpFloat[0] + kExpFloat[1];
    for (int i = 2; i < 6; ++i) p = p * r + kExpFloat[i];
    p = p * (r * r) + r + 1.0f;
    p *= reinterpret_cast<Vector<float>>((reinterpret_cast<Ints>(shifted) + 127) << 23);
    p = x < -87.3f ? Vector<float>{} : p;
    return x > 88.3f ? Vector<float>{} + __builtin_inff() : p;
}
inline Vector<double> exp_of(Vector<double> x) {
    typedef int64_t Ints __attribute__((vector_size(kVectorBytes)));
    constexpr double kRound = 0x1.8p52;
    const Vector<double> shifted = x * kLog2E + kRound, n = shifted - kRound;
    const Vector<double> r = (x - n * kLn2High) - n * kLn2Low;
    Vector<double> p = {};
    for (double coefficient : kExpDouble) p = p * r + coefficient;
    p = p * (r * r) + r + 1.0;
    p *= reinterpret_cast<Vector<double>>((reinterpret_cast<Ints>(shifted) + 1023) << 52);
    p = x < -708.0 ? Vector<double>{} : p;
    return x > 709.0 ? Vector<double>{} + __builtin_inf() : p;
}

template <class C>
struct Matrix {
    C* data;
    int64_t row, col = 1;  // elements from one row to the next, and from one column to the next
    C* at(int64_t r, int64_t c) const { return data + r * row + c * col; }
};

enum class Into { set, add };

// One block of C: kBlockRows rows, N vectors.
template <int N, class C>
inline __attribute__((always_inline)) void multiply_block(Matrix<C> c, Matrix<const C> a, Matrix<const C> b, int64_t k,
                                                          Into into) {
    constexpr int lanes = Simd<C>::lanes;
    Vector<C> sum[kBlockRows][N] = {};
    for (int64_t p = 0; p < k; ++p) {
        Vector<C> b_row[N];
        for (int n = 0; n < N; ++n) b_row[n] = Simd<C>::load(b.at(p, n * lanes));
        for (int m = 0; m < kBlockRows; ++m) {
            const C factor = *a.at(m, p);
            for (int n = 0; n < N; ++n) sum[m][n] += factor * b_row[n];
        }
    }
    for (int m = 0; m < kBlockRows; ++m)
        for (int n = 0; n < N; ++n) {
            C* out = c.at(m, n * lanes);
            Simd<C>::store(out, into == Into::add ? Simd<C>::load(out) + sum[m][n] : sum[m][n]);
        }
}

// C (kBlockRows, n) = or += A (kBlockRows, k) B (k, n)
template <class C>
void multiply_rows(Matrix<C> c, Matrix<const C> a, Matrix<const C> b, int64_t n, int64_t k, Into into) {
    constexpr int64_t lanes = Simd<C>::lanes, wide = kBlockVectors * lanes;
    int64_t done = 0;
    const auto go = [&]<int N>(std::integral_constant<int, N>) {
        multiply_block<N>({c.at(0, done), c.row}, a, {b.at(0, done), b.row}, k, into);
        done += N * lanes;
    };
    while (n - done >= wide) go(std::integral_constant<int, kBlockVectors>());
    if constexpr (kBlockVectors > 2)
        if (n - done >= 2 * lanes) go(std::integral_constant<int, 2>());
    if (n - done >= lanes) go(std::integral_constant<int, 1>());
}

}  // namespace
}  // namespace train70b::cpu
