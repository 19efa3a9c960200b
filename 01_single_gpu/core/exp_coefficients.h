#pragma once
// The polynomials of the CPU's exponentials: e^x = 2^n e^r with |r| <= ln(2)/2, and a polynomial for e^r. Constants
// only: cpu.h evaluates them for scalars and micro_kernel.h for vectors, and the latter is compiled for several
// instruction sets (attention_tiled_kernel.cpp says why it must not share inline functions).

namespace train70b::cpu {

// fp32: the minimax coefficients of Cephes' expf, from r^7 down to r^2; then r + 1.
inline constexpr float kExpFloat[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                      4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
inline constexpr float kLog2EFloat = 1.44269504f;
inline constexpr float kLn2HighFloat = 0.693359375f, kLn2LowFloat = -2.12194440e-4f;  // ln(2) in two parts

// fp64: the Taylor polynomial of degree 13, from r^13 / 13! down to r^2 / 2!; its remainder is 4e-18 at |r| = ln(2)/2.
inline constexpr double kExpDouble[] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                                        1.0 / 362880.0,     1.0 / 40320.0,     1.0 / 5040.0,     1.0 / 720.0,
                                        1.0 / 120.0,        1.0 / 24.0,        1.0 / 6.0,        1.0 / 2.0};
inline constexpr double kLog2E = 1.4426950408889634;
inline constexpr double kLn2High = 0x1.62e42feep-1, kLn2Low = 0x1.a39ef35793c76p-33;

}  // namespace train70b::cpu
