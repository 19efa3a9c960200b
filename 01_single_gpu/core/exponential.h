#pragma once
// e^x on the CPU without branches or calls, so that loops over it vectorize; of a number, or of every lane of a vector
// (micro_kernel.h). Internal linkage: it is compiled for several instruction sets, and attention_tiled_kernel.cpp says
// why they must not share a function.
//   e^x = 2^n e^r,  n = x / ln(2) rounded,  |r| <= ln(2)/2,  and a polynomial for e^r.
#include <cstdint>

namespace train70b::cpu {

template <class C>
struct Exp;

// The minimax coefficients of Cephes' expf, from r^7 down to r^2; then r + 1.
template <>
struct Exp<float> {
    using Bits = uint32_t;
    static constexpr int mantissa = 23, bias = 127;
    static constexpr float lowest = -87.3f, highest = 88.3f, log2_e = 1.44269504f;
    static constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;  // ln(2) in two parts
    static constexpr float coefficients[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                             4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
};

// The Taylor polynomial of degree 13, from r^13 / 13! down to r^2 / 2!; its remainder is 4e-18 at |r| = ln(2)/2.
template <>
struct Exp<double> {
    using Bits = uint64_t;
    static constexpr int mantissa = 52, bias = 1023;
    static constexpr double lowest = -708, highest = 709, log2_e = 1.4426950408889634;
    static constexpr double ln2_high = 0x1.62e42feep-1, ln2_low = 0x1.a39ef35793c76p-33;
    static constexpr double coefficients[] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                                              1.0 / 362880.0,     1.0 / 40320.0,     1.0 / 5040.0,     1.0 / 720.0,
                                              1.0 / 120.0,        1.0 / 24.0,        1.0 / 6.0,        1.0 / 2.0};
};

// To about one unit in the last place. 0 below -87.3 (fp64: -708), where results become subnormal, infinity above 88.3
// (709; anything without kMayOverflow); NaN stays NaN. V: C, or a vector of it, and Bits the same of unsigned integers.
template <class V, class C = V, class Bits = typename Exp<C>::Bits, bool kMayOverflow = true>
static inline V exp_simd(V x) {
    using E = Exp<C>;
    // Adding `round` leaves n + bias in the last bits, from where a shift makes 2^n of it. What overflows is replaced
    // at the end. (If x were clamped first, GCC would compute all that follows for either bound, too.)
    constexpr C round = C(int64_t{3} << (E::mantissa - 1)) + E::bias;
    const V shifted = x * E::log2_e + round, n = shifted - round;
    const V r = (x - n * E::ln2_high) - n * E::ln2_low;
    V p = r * E::coefficients[0] + E::coefficients[1];
#pragma GCC unroll 16
    for (unsigned i = 2; i < sizeof E::coefficients / sizeof(C); ++i) p = p * r + E::coefficients[i];
    p = p * r * r + r + C(1);
    p *= __builtin_bit_cast(V, __builtin_bit_cast(Bits, shifted) << E::mantissa);
    p = x < E::lowest ? V{} : p;
    if constexpr (!kMayOverflow) return p;
    return x > E::highest ? V{} + C(__builtin_inf()) : p;
}

}  // namespace train70b::cpu
