#pragma once
// The matrix products of attention's tiles, C (m, n) = A (m, k) B (k, n) or C += A B, with a block of C in registers:
// what the BLAS literature calls a micro-kernel. A BLAS call on a tile of 64 x 64 x 16 spends much of its time packing.
//   One step of k loads a row of B (one or two vectors) and broadcasts a column of A one number at a time; each
//   number and each vector take one fused multiply-add. A's strides are constants, so that the addresses of its rows
//   need no registers; B and C are row-major. The caller pads m and n; k is exact.
// Everything here has internal linkage: see attention_tiled_kernel.cpp for the reason.
#include <cstdint>
#include <utility>

#include "01_single_gpu/core/exponential.h"

namespace train70b::cpu {
namespace {

// Enough accumulators to hide the latency of the multiply-add, and few enough to leave registers for B.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kAccumulators = 16;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32, kAccumulators = 8;
#else
constexpr int kVectorBytes = 16, kAccumulators = 8;
#endif
constexpr int64_t kPad = 16;  // elements: whole vectors of float and of double, and whole blocks of rows

template <class C>
struct Simd {
    typedef C Vector __attribute__((vector_size(kVectorBytes)));
    typedef C Unaligned __attribute__((vector_size(kVectorBytes), aligned(alignof(C)), may_alias));
    static constexpr int lanes = kVectorBytes / sizeof(C);
    static constexpr int wide = 2 * lanes;  // the widest row of a block in registers
    static_assert(kPad % lanes == 0 && kPad % kAccumulators == 0);

    static Vector load(const C* p) { return *reinterpret_cast<const Unaligned*>(p); }
    static void store(C* p, Vector v) { *reinterpret_cast<Unaligned*>(p) = v; }
    template <int Step = lanes / 2>
    static C sum(Vector v) {  // by halves
        if constexpr (Step == 0)
            return v[0];
        else
            return sum<Step / 2>(v + rotate<Step>(v, std::make_integer_sequence<int, lanes>()));
    }
    template <int Step, int... I>
    static Vector rotate(Vector v, std::integer_sequence<int, I...>) {
        return __builtin_shufflevector(v, v, (I + Step) % lanes...);
    }
    static Vector larger(Vector a, Vector b) { return a > b ? a : b; }  // b where a is NaN
    typedef typename Exp<C>::Bits Bits __attribute__((vector_size(kVectorBytes)));
    static Vector exp(Vector x) {  // of x that are small enough: at most a score's distance to the largest
        return exp_simd<Vector, C, Bits, false>(x);
    }
    // Of x >= 1: a chord's guess, 0.06 off, and Halley's steps, each of which cubes the error and divides it by 12.
    static Vector log(Vector x) {
        const Bits mantissa = reinterpret_cast<Bits>(x) - (typename Exp<C>::Bits(Exp<C>::bias) << Exp<C>::mantissa);
        Vector y = __builtin_convertvector(mantissa, Vector) * C(0.6931471805599453 / (int64_t{1} << Exp<C>::mantissa));
        for (int step = 0; step < 2; ++step) {
            const Vector e = exp(y);
            y += C(2) * (x - e) / (x + e);
        }
        return y;
    }
    static Vector count_from(C first) {  // first, first + 1, ...
        Vector v;
        for (int i = 0; i < lanes; ++i) v[i] = C(i);
        return v + first;
    }
};

template <class C>
using Vector = typename Simd<C>::Vector;

template <class C>
struct Matrix {
    C* data;
    int64_t row;  // elements from one row to the next
    C* at(int64_t r, int64_t c) const { return data + r * row + c; }
};

enum class Into { set, add };

// One block of C: M rows, N vectors.
template <int M, int N, int kRow, int kCol, class C>
inline __attribute__((always_inline)) void multiply_block(Matrix<C> c, const C* a, Matrix<const C> b, int64_t k,
                                                          Into into) {
    constexpr int lanes = Simd<C>::lanes;
    Vector<C> sum[M][N] = {};
    for (int64_t p = 0; p < k; ++p) {
        Vector<C> b_row[N];
        for (int n = 0; n < N; ++n) b_row[n] = Simd<C>::load(b.at(p, n * lanes));
        for (int m = 0; m < M; ++m) {
            const C factor = a[m * kRow + p * kCol];
            for (int n = 0; n < N; ++n) sum[m][n] += factor * b_row[n];
        }
    }
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) {
            C* out = c.at(m, n * lanes);
            Simd<C>::store(out, into == Into::add ? Simd<C>::load(out) + sum[m][n] : sum[m][n]);
        }
}

// C (m, n) = or += A (m, k) B (k, n). m: a multiple of a vector's lanes; n: of kPad, or of two vectors. kRow, kCol:
// elements of A from one row to the next, and from one column to the next.
template <int kRow, int kCol, class C>
void multiply(Matrix<C> c, const C* a, Matrix<const C> b, int64_t m, int64_t n, int64_t k, Into into) {
    constexpr int lanes = Simd<C>::lanes;
    const auto columns = [&]<int N>(std::integral_constant<int, N>, int64_t done) {
        constexpr int M = kAccumulators / N < lanes ? kAccumulators / N : lanes;
        for (int64_t r = 0; r < m; r += M)
            multiply_block<M, N, kRow, kCol, C>({c.at(r, done), c.row}, a + r * kRow, {b.at(0, done), b.row}, k, into);
    };
    int64_t done = 0;
    for (; n - done >= 2 * lanes; done += 2 * lanes) columns(std::integral_constant<int, 2>(), done);
    if (n > done) columns(std::integral_constant<int, 1>(), done);
}

// to (cols, rows) = from (rows, cols) transposed; both are multiples of kPad. Blocks of as many rows as a vector has
// lanes are zipped, first half with second half, as often as it takes.
template <int kHalf, class V, int... I>
V zipped(V a, V b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I % 2 * int(sizeof...(I)) + kHalf + I / 2)...);
}
template <class C>
void transpose(Matrix<C> to, Matrix<const C> from, int64_t rows, int64_t cols) {
    constexpr int lanes = Simd<C>::lanes;
    constexpr std::make_integer_sequence<int, lanes> all;
    for (int64_t r = 0; r < rows; r += lanes)
        for (int64_t c = 0; c < cols; c += lanes) {
            Vector<C> x[lanes], y[lanes];
            for (int i = 0; i < lanes; ++i) x[i] = Simd<C>::load(from.at(r + i, c));
            for (int step = 1; step < lanes; step *= 2) {
                for (int i = 0; i < lanes / 2; ++i) {
                    y[2 * i] = zipped<0>(x[i], x[i + lanes / 2], all);
                    y[2 * i + 1] = zipped<lanes / 2>(x[i], x[i + lanes / 2], all);
                }
                for (int i = 0; i < lanes; ++i) x[i] = y[i];
            }
            for (int i = 0; i < lanes; ++i) Simd<C>::store(to.at(c + i, r), x[i]);
        }
}

}  // namespace
}  // namespace train70b::cpu
